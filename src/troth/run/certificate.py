"""Certificates of draft heads: what one binds, where it lies, and whether it speaks for a load.

A certificate is a JSON object that ``troth certify`` writes after it has run a head against a plain computation of it
(``certification.py``). It speaks for the same files computed by the same program in the same numbers on the same
kind of device, and for nothing else. Refuses to know how anything is proved.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any, Final

from troth.artifact.artifact import Artifact
from troth.artifact.json_file import read_json_object
from troth.errors import ModelLoadError, OptionError

FORMAT: Final = 1
"""Raised by one whenever the fields change their meaning."""
MAX_BYTES: Final = 64 * 1024
_COMPUTES: Final = ("cache", "contracts", "draft", "models", "nn", "ops", "run", "schedule", "weights")
"""Packages whose code takes part in an answer or a draft."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Computation:
    """How a model is computed: all of it must be as certified."""

    implementation: str
    """SHA-256 of the code that computes."""
    device: str
    """cpu, or the name of the GPU."""
    dtype: str
    kv_dtype: str
    providers: tuple[str, ...]
    """Active op providers, in order."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Certificate:
    """What was proved of which head."""

    model: str
    """Its name, for readers."""
    version: str
    """Of Troth, for readers; ``computation`` binds its code."""
    digest: str
    """Of the artifact's whole content (``Artifact.digest``): weights, config and tokenizer."""
    fingerprint: str
    """Of the files as they lay there (``Artifact.fingerprint``): where it agrees, nothing is read again."""
    computation: Computation
    findings: dict[str, Any] = field(default_factory=dict)
    """What was run, and what came out."""

    def refusal(self, artifact: Artifact, computation: Computation) -> str | None:
        """Why it does not speak for a load; None: it does. May read all of the artifact.

        Raises:
            ModelLoadError: a file changed since the artifact was resolved.
        """
        for bound in dataclasses.fields(Computation):
            was, is_now = (getattr(one, bound.name) for one in (self.computation, computation))
            if was != is_now:
                return f"its certificate is for another {bound.name} ({_shown(was)}, not {_shown(is_now)})"
        if self.fingerprint != artifact.fingerprint() and self.digest != artifact.digest():
            return "its certificate is for other files"
        return None

    def write(self, path: Path) -> None:
        """Put it in its place, whole or not at all. Raises OptionError: the folder cannot be written to."""
        text = json.dumps({"format": FORMAT, **dataclasses.asdict(self)}, indent=2, ensure_ascii=False)
        unfinished = path.with_name(f"{path.name}.{os.getpid()}")
        try:
            path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
            unfinished.write_text(f"{text}\n", encoding="utf-8")
            unfinished.replace(path)
        except OSError as error:
            with suppress(OSError):
                unfinished.unlink()
            why = error.strerror or error
            raise OptionError(
                f"{path}: the certificate cannot be written: {why}; set XDG_CACHE_HOME to another folder"
            ) from error


def read_certificate(path: Path) -> Certificate | None:
    """The certificate in a file; None: there is none.

    Raises:
        ModelLoadError: what is there is no certificate.
    """
    if not path.exists():
        return None
    values = read_json_object(path, limit_bytes=MAX_BYTES)
    try:
        if values.pop("format") != FORMAT:
            raise ValueError("another format")
        inner = dict(values.pop("computation"))
        computation = Computation(**inner | {"providers": tuple(inner["providers"])})
        found = Certificate(**values, computation=computation)
        texts = (found.model, found.version, found.digest, found.fingerprint)
        if not all(isinstance(text, str) for text in texts):
            raise TypeError("a field is no text")
    except (KeyError, TypeError, ValueError) as error:
        raise ModelLoadError(
            f"is no certificate of this version ({error}); run troth certify again", path=str(path)
        ) from error
    return found


def certificate_path(folder: Path, artifact: Artifact, computation: Computation) -> Path:
    """Where the certificate of an artifact lies, for one device and one choice of numbers. Reads nothing."""
    headers = hashlib.sha256()
    for file in artifact.files:
        headers.update(f"{file.name}\0{file.stamp.size_bytes}\n".encode())
    if artifact.gguf is not None:
        headers.update(artifact.gguf.sha256.encode())
    for shard in artifact.safetensors.shards if artifact.safetensors is not None else ():
        headers.update(shard.sha256.encode())
    for word in (computation.device, computation.dtype, computation.kv_dtype):
        headers.update(f"{word}\0".encode())
    return folder / f"{headers.hexdigest()[:40]}.json"


@cache
def implementation() -> str:
    """SHA-256 of the code that computes, compiled kernels included."""
    package = Path(__file__).parents[1]
    files = [path for name in _COMPUTES for path in (package / name).rglob("*.py")] + [*package.glob("_cpu*")]
    digest = hashlib.sha256()
    for path in sorted(files):
        digest.update(f"{path.relative_to(package).as_posix()}\0".encode())
        digest.update(path.read_bytes())
    return digest.hexdigest()


def _shown(value: object) -> str:
    text = " ".join(value) if isinstance(value, tuple) else str(value)
    return f"{text:.12}..." if len(text) > 40 else text
