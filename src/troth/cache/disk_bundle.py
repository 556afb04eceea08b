"""A bundle: tensors of consecutive blocks in one file of the disk tier, named after its own content.

Refuses to know what is worth keeping (``disk_tier.py``). A file is safetensors; its name is the SHA-256 of its bytes,
so that a damaged one betrays itself, and its header lists the blocks it holds, so that nothing else has to be believed.
"""

from __future__ import annotations

import json
import os
import re
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import Final

from safetensors import SafetensorError
from safetensors.torch import load, save
from torch import Tensor

from troth.cache.disk_names import BundleKind
from troth.cache.regular_file import open_regular

_FORMAT: Final = "troth-cache-1"
SUFFIX: Final = ".safetensors"
FILE: Final = re.compile(r"([0-9a-f]{2})/\1[0-9a-f]{62}\.safetensors", re.ASCII)
"""The names of bundles. Other files may lie in the folder that somebody chose; they are nobody's to open or remove."""
_NAME_BYTES: Final = 32
_MAX_HEADER_BYTES: Final = 2**24
_KIND: Final = re.compile(r"kv\d{1,3}|state", re.ASCII)
NO_TENSORS: Final = (SafetensorError, ValueError, KeyError, TypeError, RuntimeError, OverflowError)
"""What reading tensors may raise: a header can name shapes that no tensor has, and types that this torch has not."""


class DamagedBundle(Exception):
    """A file is missing, cut, changed, or not what its name says."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Bundle:
    """What a file holds."""

    kind: BundleKind
    namespace: str
    names: tuple[bytes, ...]
    """Of its blocks, in order; of a state, the one block it follows."""
    tensors: dict[str, Tensor]
    """First dimension: blocks."""

    @property
    def num_bytes(self) -> int:
        """Bytes of the tensors."""
        return sum(tensor.numel() * tensor.element_size() for tensor in self.tensors.values())


def write_bundle(bundle: Bundle, folder: Path, scratch: Path) -> tuple[str, int]:
    """Write a file under ``folder`` by way of ``scratch``, on the same disk: it appears whole or not at all.

    Returns:
        Its name relative to ``folder``, and its bytes.

    Raises:
        OSError: the disk is full or read-only.
    """
    names = b"".join(bundle.names).hex()
    metadata = {"format": _FORMAT, "kind": bundle.kind, "namespace": bundle.namespace, "names": names}
    content = save(bundle.tensors, metadata)
    digest = sha256(content).hexdigest()
    file = f"{digest[:2]}/{digest}{SUFFIX}"
    path, unfinished = folder / file, scratch / digest
    path.parent.mkdir(exist_ok=True)
    try:
        unfinished.write_bytes(content)
        os.replace(unfinished, path)
    except OSError:
        unfinished.unlink(missing_ok=True)
        raise
    return file, len(content)


def read_bundle(folder: Path, file: str) -> Bundle:
    """Read a file and prove that it is what was written.

    Raises:
        DamagedBundle: it is not.
    """
    try:
        with open_regular(folder / file, os.O_RDONLY) as opened:
            content = opened.read()
    except OSError as error:
        raise DamagedBundle(f"{file}: {error}") from error
    if sha256(content).hexdigest() != Path(file).stem:
        raise DamagedBundle(f"{file}: its content has another digest than its name")
    header = _metadata(content, file)
    try:
        tensors = load(content)
    except NO_TENSORS as error:
        raise DamagedBundle(f"{file}: its tensors cannot be read: {error}") from error
    if any(tensor.shape[:1] != (len(header.names),) for tensor in tensors.values()):
        raise DamagedBundle(f"{file}: its tensors are not of {len(header.names)} blocks")
    return Bundle(kind=header.kind, namespace=header.namespace, names=header.names, tensors=tensors)


def describe_bundle(folder: Path, file: str) -> Bundle:
    """What a file says of itself, its tensors left out and its digest not checked.

    Raises:
        DamagedBundle: it says nothing that can be read.
    """
    try:
        with open_regular(folder / file, os.O_RDONLY) as opened:
            length = int.from_bytes(opened.read(8), "little")
            content = length.to_bytes(8, "little") + opened.read(min(length, _MAX_HEADER_BYTES))
    except OSError as error:
        raise DamagedBundle(f"{file}: {error}") from error
    return _metadata(content, file)


def _metadata(content: bytes, file: str) -> Bundle:
    length = int.from_bytes(content[:8], "little")
    try:
        metadata = json.loads(content[8 : 8 + length])["__metadata__"]
        kind, namespace, names = metadata["kind"], str(metadata["namespace"]), bytes.fromhex(metadata["names"])
        namespace.encode()  # half of a surrogate pair is no text, and no database takes it
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise DamagedBundle(f"{file}: its header cannot be read") from error
    if metadata.get("format") != _FORMAT or not _KIND.fullmatch(str(kind)) or len(names) % _NAME_BYTES or not names:
        raise DamagedBundle(f"{file}: not a file of this cache")
    split = tuple(names[at : at + _NAME_BYTES] for at in range(0, len(names), _NAME_BYTES))
    return Bundle(kind=kind, namespace=namespace, names=split, tensors={})
