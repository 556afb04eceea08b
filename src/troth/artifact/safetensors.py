"""Safetensors headers, read strictly: which tensors a model's shards hold and where. No data is touched.

Refuses to know what a tensor is for; the bytes become tensors in ``weights/safetensors.py``.

    file   = header length u64 | header | data
    header = JSON object: name -> {"dtype", "shape", "data_offsets": [begin, end) in data}, and "__metadata__"
    index  = JSON object: "weight_map": name -> file name; written beside the shards of a large model

Format: the safetensors README. It forbids holes, overlaps and duplicate names; so does this reader.
"""

from __future__ import annotations

import hashlib
import os
import re
import struct
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, NoReturn

from troth.artifact.json_file import MAX_JSON_BYTES, parse_json_object, read_json_object
from troth.artifact.regular_file import FileStamp, RegularFile
from troth.errors import ModelLoadError

INDEX_NAME: Final = "model.safetensors.index.json"
SINGLE_NAME: Final = "model.safetensors"
MAX_SHARDS: Final = 4096
MAX_RANK: Final = 16
# Anything with a folder in it could lead out of the model.
_PLAIN_NAME: Final = re.compile(r"[\w.+@-][\w.+@ -]{0,250}\.safetensors", re.ASCII)
DTYPE_BITS: Final[Mapping[str, int]] = {
    "BOOL": 8, "U8": 8, "I8": 8, "U16": 16, "I16": 16, "U32": 32, "I32": 32, "U64": 64, "I64": 64,
    "F64": 64, "F32": 32, "F16": 16, "BF16": 16, "C64": 64,
    "F8_E4M3": 8, "F8_E5M2": 8, "F8_E8M0": 8, "F8_E4M3FNUZ": 8, "F8_E5M2FNUZ": 8,
    "F6_E2M3": 6, "F6_E3M2": 6, "F4": 4,
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class SafetensorsTensor:
    """Where one tensor lies in its shard."""

    name: str
    shape: tuple[int, ...]
    """Row-major, outermost first; () for a scalar."""
    dtype: str
    """As the file spells it: a key of DTYPE_BITS."""
    offset: int
    """Bytes from the start of the file."""
    num_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class SafetensorsShard:
    """The header of one file. Holds no open file."""

    path: Path
    tensors: Mapping[str, SafetensorsTensor]
    """In order of their bytes; together they cover the file's data exactly."""
    metadata: Mapping[str, str]
    """What the writer put under ``__metadata__``."""
    stamp: FileStamp
    sha256: str
    """Hex digest of the header's bytes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SafetensorsHeaders:
    """The headers of all shards of one model."""

    shards: tuple[SafetensorsShard, ...]
    """In order of their names. A tensor name is in one shard only."""

    @property
    def num_bytes(self) -> int:
        """Bytes of all tensors."""
        return sum(tensor.num_bytes for shard in self.shards for tensor in shard.tensors.values())


def read_safetensors(root: Path, locate: Callable[[str], Path]) -> SafetensorsHeaders:
    """Read the headers of the model in the folder ``root``: the shards of its index, else model.safetensors.

    ``locate`` turns a file name into the path to open, or raises ModelLoadError when it leads out of bounds.

    Raises:
        ModelLoadError: a file is missing or damaged, or index and shards disagree.
    """
    if not os.path.lexists(root / INDEX_NAME):
        return SafetensorsHeaders(shards=(read_shard(locate(SINGLE_NAME)),))
    path = locate(INDEX_NAME)
    weight_map = _weight_map(read_json_object(path), path)
    claims: dict[str, set[str]] = {}
    for name, file_name in weight_map.items():
        claims.setdefault(file_name, set()).add(name)
    if len(claims) > MAX_SHARDS:
        _fail(path, f"names {len(claims)} files; at most {MAX_SHARDS} are read here", "weight_map")
    if SINGLE_NAME not in claims and os.path.lexists(root / SINGLE_NAME):
        message = f"names other files, but {SINGLE_NAME} is there too; remove the one that is not the model"
        _fail(path, message, "weight_map")
    shards = []
    for file_name, claimed in sorted(claims.items()):
        shard = read_shard(locate(file_name))
        if shard.tensors.keys() != claimed:
            _fail(path, _disagreement(weight_map, file_name, claimed, shard), "weight_map")
        shards.append(shard)
    return SafetensorsHeaders(shards=tuple(shards))


def read_shard(path: Path) -> SafetensorsShard:
    """Read the header of one file, which is opened once.

    Raises:
        ModelLoadError: the file cannot be read or is damaged; ``field`` names the tensor at fault.
    """
    with RegularFile(path) as file:
        size = file.stamp.size_bytes
        head = file.read_exactly(8) if size >= 8 else b""
        length = struct.unpack("<Q", head)[0] if head else 0
        if not 2 <= length <= size - 8:
            _fail(path, f"is not a safetensors file: a header of {length} bytes in a file of {size}")
        if length > MAX_JSON_BYTES:
            _fail(path, f"has a header of {length} bytes; at most {MAX_JSON_BYTES} are read here")
        raw = file.read_exactly(length)
        stamp = file.stamp
    if raw[:1] != b"{":
        _fail(path, "does not begin with {; fetch the file again")
    header = parse_json_object(raw, path, field="header")
    metadata = _metadata(header.pop("__metadata__", {}), path)
    data_offset = 8 + length
    tensors = [_tensor(name, entry, path, data_offset) for name, entry in header.items()]
    tensors.sort(key=lambda tensor: (tensor.offset, tensor.num_bytes))
    _prove_cover(tensors, path, data_offset, size)
    return SafetensorsShard(
        path=path,
        tensors={tensor.name: tensor for tensor in tensors},
        metadata=metadata,
        stamp=stamp,
        sha256=hashlib.sha256(raw).hexdigest(),
    )


def _fail(path: Path, message: str, field: str = "header") -> NoReturn:
    raise ModelLoadError(message, path=str(path), field=field[:256])


def _metadata(value: Any, path: Path) -> dict[str, str]:
    if not isinstance(value, dict) or not all(isinstance(text, str) for text in value.values()):
        _fail(path, "must map names to strings", "__metadata__")
    return value


def _tensor(name: str, entry: Any, path: Path, data_offset: int) -> SafetensorsTensor:
    if not isinstance(entry, dict) or set(entry) != {"dtype", "shape", "data_offsets"}:
        _fail(path, "a tensor is described by dtype, shape and data_offsets and nothing else", name)
    dtype, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
    if not isinstance(dtype, str) or dtype not in DTYPE_BITS:
        _fail(path, f"dtype {dtype!r:.40} is unknown here", name)
    if not _are_counts(shape) or len(shape) > MAX_RANK:
        _fail(path, f"shape {shape!r:.80} is not a list of at most {MAX_RANK} sizes", name)
    if not _are_counts(offsets) or len(offsets) != 2 or offsets[0] > offsets[1]:
        _fail(path, f"data_offsets {offsets!r:.80} are not a begin and an end", name)
    num_bits = DTYPE_BITS[dtype]
    for length in shape:
        num_bits *= length
    begin, end = offsets
    if num_bits != (end - begin) * 8:
        _fail(path, f"{dtype} of shape {shape!r:.200} does not take the {end - begin} bytes it claims", name)
    return SafetensorsTensor(name, tuple(shape), dtype, data_offset + begin, end - begin)


def _are_counts(value: Any) -> bool:
    """Whether this is a list of integers from 0 to 2**63 - 1, small enough that products stay cheap."""
    return isinstance(value, list) and all(type(item) is int and 0 <= item < 2**63 for item in value)


def _prove_cover(tensors: list[SafetensorsTensor], path: Path, data_offset: int, size: int) -> None:
    position = data_offset
    for tensor in tensors:
        if tensor.offset != position:
            what = "overlaps the tensor before it" if tensor.offset < position else "leaves a hole before it"
            _fail(path, f"{what}: begins at byte {tensor.offset}, not {position}", tensor.name)
        position += tensor.num_bytes
    if position > size:
        _fail(path, f"tensors reach to byte {position}, but the file ends at {size}; fetch it again")
    if position < size:
        _fail(path, f"tensors end at byte {position}, but the file goes on to {size}; fetch it again")


def _weight_map(index: Mapping[str, Any], path: Path) -> dict[str, str]:
    weight_map = index.get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        _fail(path, "must map tensor names to file names", "weight_map")
    for name, file_name in weight_map.items():
        if not isinstance(file_name, str) or not _PLAIN_NAME.fullmatch(file_name):
            message = f"puts {name!r:.80} into {file_name!r:.80}, which names no safetensors file"
            _fail(path, message, "weight_map")
    return weight_map


def _disagreement(weight_map: Mapping[str, str], file_name: str, claimed: set[str], shard: SafetensorsShard) -> str:
    absent = claimed - shard.tensors.keys()
    if absent:
        return f"says that {file_name} holds {min(absent):.256}, which it does not"
    extra = min(shard.tensors.keys() - claimed)
    return f"puts {extra:.256} into {weight_map.get(extra, 'no file')}, but {file_name} holds it"
