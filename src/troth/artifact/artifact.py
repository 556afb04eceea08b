"""A model as it lies on disk: its files, what their headers say, and two ways to tell it from any other.

Refuses to know how a model is found (``resolve.py``) and what its config means (the families). Holds no open
file: ``weights/`` opens them again and checks that they are still the ones described here.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from math import prod
from pathlib import Path
from typing import Literal

from troth.artifact.gguf import GgufHeader
from troth.artifact.json_file import JsonObject
from troth.artifact.regular_file import FileStamp, RegularFile
from troth.artifact.safetensors import SafetensorsHeaders
from troth.artifact.template_source import TemplateSource

Progress = Callable[[int, int], None]
"""Called with (bytes done, bytes in all)."""

_READ_BYTES = 4 * 2**20


@dataclass(frozen=True, slots=True)
class ArtifactFile:
    """One file of an artifact, as it was when the artifact was resolved."""

    name: str
    """Relative to the artifact's root."""
    path: Path
    """Where it really lies, symbolic links followed."""
    stamp: FileStamp


@dataclass(frozen=True, slots=True, kw_only=True)
class Artifact:
    """The files that hold one model, and everything their headers say."""

    kind: Literal["gguf", "safetensors"]
    root: Path
    """The folder of config.json and its shards, or the one the .gguf lies in."""
    name: str
    """The folder's or file's name without suffix; org/model for a folder of the Hugging Face cache."""
    files: tuple[ArtifactFile, ...]
    """Every file the model is made of, in order of names."""
    config: JsonObject
    """config.json as it is; empty for a GGUF, whose metadata says the same."""
    generation_config: JsonObject
    """generation_config.json as it is; empty when there is none."""
    tokenizer_files: Mapping[str, Path]
    """File name (tokenizer.json, merges.txt ...) -> where it lies; empty for a GGUF."""
    chat_template: TemplateSource | None
    gguf: GgufHeader | None
    """Set when ``kind`` is gguf."""
    safetensors: SafetensorsHeaders | None
    """Set when ``kind`` is safetensors."""
    _digest: list[str] = field(default_factory=list, repr=False, compare=False)
    """The digest, once it was computed."""

    @property
    def weight_bytes(self) -> int:
        """Bytes of all tensors as they lie on disk."""
        if self.gguf is not None:
            return sum(tensor.num_bytes for tensor in self.gguf.tensors.values())
        assert self.safetensors is not None, self.kind
        return self.safetensors.num_bytes

    @property
    def num_values(self) -> int:
        """Numbers in all tensors; of weights that a safetensors file packs into words, the words."""
        if self.gguf is not None:
            return sum(prod(tensor.shape) for tensor in self.gguf.tensors.values())
        assert self.safetensors is not None, self.kind
        return sum(prod(tensor.shape) for shard in self.safetensors.shards for tensor in shard.tensors.values())

    @property
    def total_bytes(self) -> int:
        """Bytes of all files."""
        return sum(file.stamp.size_bytes for file in self.files)

    def fingerprint(self) -> str:
        """A cheap key for caches on this machine: hex SHA-256 of names, stamps and weight headers.

        Equal fingerprints mean the same files, untouched; a copy of a model has another one. Reads nothing.
        """
        digest = hashlib.sha256()
        for file in self.files:
            stamp = file.stamp
            digest.update(f"{file.name}\0{stamp.size_bytes} {stamp.mtime_ns} {stamp.inode}\n".encode())
        if self.gguf is not None:
            digest.update(self.gguf.sha256.encode())
        for shard in self.safetensors.shards if self.safetensors is not None else ():
            digest.update(shard.sha256.encode())
        return digest.hexdigest()

    def digest(self, progress: Progress | None = None) -> str:
        """The exact content as hex SHA-256, the same on every machine. Reads all bytes; later calls are free.

        Of a GGUF it is what ``sha256sum`` prints for the file; of a folder, the SHA-256 of the lines that
        ``sha256sum`` prints for its files in order of names.

        Raises:
            ModelLoadError: a file changed since the artifact was resolved.
        """
        if not self._digest:
            self._digest.append(self._compute_digest(progress))
        return self._digest[0]

    def _compute_digest(self, progress: Progress | None) -> str:
        num_done, total = 0, self.total_bytes

        def advance(num_bytes: int) -> None:
            nonlocal num_done
            num_done += num_bytes
            if progress is not None:
                progress(num_done, total)

        digests = [_file_digest(file, advance) for file in self.files]
        if self.kind == "gguf":
            return digests[0]
        lines = (f"{digest}  {file.name}\n" for digest, file in zip(digests, self.files, strict=True))
        return hashlib.sha256("".join(lines).encode()).hexdigest()


def _file_digest(file: ArtifactFile, advance: Callable[[int], None]) -> str:
    digest = hashlib.sha256()
    buffer = bytearray(_READ_BYTES)
    view = memoryview(buffer)
    with RegularFile(file.path) as opened:
        while num_bytes := opened.read_into(buffer):
            digest.update(view[:num_bytes])
            advance(num_bytes)
        opened.expect(file.stamp)
    return digest.hexdigest()
