"""GGUF headers, read strictly: metadata, and where each tensor lies. No tensor data is touched.

Refuses to know what a key means or which model this is: the families ask for the keys they need. The bytes of
tensors become numbers in ``weights/``. Why this is not the gguf package's reader: docs/adr/0005.

    file    = "GGUF" | version u32 | tensor count u64 | key count u64 | keys | tensor infos | padding | data
    key     = name string | value type u32 | value
    info    = name string | rank u32 | dims u64 each, innermost first | ggml type u32 | offset u64 in data
    string  = length u64 | bytes      array = value type u32 | count u64 | values       all little-endian

Format: the GGUF specification of ggml (docs/gguf.md), versions 2 and 3.
"""

from __future__ import annotations

import hashlib
import os
import struct
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, NoReturn

from troth.artifact.ggml_types import GgmlType
from troth.artifact.regular_file import FileStamp, RegularFile
from troth.errors import ModelLoadError

Scalar = int | float | bool | str
MetadataValue = Scalar | list[int] | list[float] | list[bool] | list[str]

MAGIC: Final = b"GGUF"
VERSIONS: Final = (2, 3)
DEFAULT_ALIGNMENT: Final = 32
MAX_RANK: Final = 4
# Bounds on hostile headers, several times what large models need: Gemma 3's header is 6.2 MiB with
# 0.8 million array values (262,144 tokens, their scores and types); thousands of tensors are already many.
MAX_HEADER_BYTES: Final = 128 * 2**20
MAX_ARRAY_VALUES: Final = 4 * 2**20
MAX_KEYS: Final = 2**16
MAX_TENSORS: Final = 2**17
MAX_NAME_BYTES: Final = 2**16 - 1
_FIRST_PIECE_BYTES: Final = 2**20

_U32: Final = struct.Struct("<I")
_U64: Final = struct.Struct("<Q")
_BOOL, _STRING, _ARRAY = 7, 8, 9
_NUMBER_CODES: Final[Mapping[int, str]] = {
    0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 10: "Q", 11: "q", 12: "d",
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class GgufTensor:
    """Where one tensor lies in its file."""

    name: str
    shape: tuple[int, ...]
    """Row-major, outermost first: a linear layer is (outputs, inputs). GGUF stores the reverse."""
    ggml_type: GgmlType
    offset: int
    """Bytes from the start of the file."""
    num_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class GgufHeader:
    """Everything a GGUF file says before its tensor data. Holds no open file."""

    path: Path
    version: int
    metadata: Mapping[str, MetadataValue] = field(repr=False)
    """Keys in file order. Integers, floats, bools and strings as Python's own; arrays as lists of them.

    Strings that are not UTF-8 (byte pieces of some vocabularies) keep their bytes as surrogate escapes:
    ``text.encode("utf-8", "surrogateescape")`` gives back exactly what the file holds.
    """
    tensors: Mapping[str, GgufTensor] = field(repr=False)
    """Tensors in file order; none overlaps another or reaches past the end of the file."""
    alignment: int
    """Every offset is a multiple of it, in bytes."""
    data_offset: int
    """Where tensor data begins, in bytes from the start of the file."""
    stamp: FileStamp
    sha256: str
    """Hex digest of the bytes before the padding in front of the tensor data."""


def read_gguf(path: str | os.PathLike[str]) -> GgufHeader:
    """Read the header of a GGUF file.

    Raises:
        ModelLoadError: the file cannot be read, is not GGUF 2 or 3, is damaged, or passes a bound above;
            ``field`` names the key or tensor where reading stopped.
    """
    resolved = Path(os.path.realpath(path))
    with RegularFile(resolved) as file:
        return _HeaderReader(file).read()


class _HeaderReader:
    """A position moving once over the header, which is read in growing pieces.

    Not over a map: slicing 262,144 strings out of an mmap takes twice the time, and a file cut short
    meanwhile would end the process.
    """

    __slots__ = ("_array_values_left", "_data", "_end", "_field", "_file", "_path", "_position", "_stamp")

    def __init__(self, file: RegularFile) -> None:
        self._file = file
        self._path = file.path
        self._stamp = file.stamp
        self._data = b""
        self._end = min(file.stamp.size_bytes, MAX_HEADER_BYTES)
        self._position = 0
        self._field = "header"
        self._array_values_left = MAX_ARRAY_VALUES

    def read(self) -> GgufHeader:
        version = self._version()
        num_tensors = self._count("tensors", self._u64(), MAX_TENSORS, smallest_bytes=8 + 1 + 4 + 8 + 4 + 8)
        num_keys = self._count("keys", self._u64(), MAX_KEYS, smallest_bytes=8 + 1 + 4 + 1)
        metadata = self._metadata(num_keys)
        alignment = self._alignment(metadata)
        infos = [self._tensor_info(index) for index in range(num_tensors)]
        data_offset = -(-self._position // alignment) * alignment
        tensors = self._place(infos, alignment, data_offset)
        return GgufHeader(
            path=self._path,
            version=version,
            metadata=metadata,
            tensors=tensors,
            alignment=alignment,
            data_offset=data_offset,
            stamp=self._stamp,
            sha256=hashlib.sha256(self._data[: self._position]).hexdigest(),
        )

    def _fail(self, message: str) -> NoReturn:
        raise ModelLoadError(message, path=str(self._path), field=self._field[:256])

    def _take(self, num_bytes: int) -> int:
        """Move over ``num_bytes`` and return where they start."""
        start = self._position
        stop = start + num_bytes
        if stop > self._end:
            self._cut_short(num_bytes)
        if stop > len(self._data):
            wanted = min(self._end, max(stop, 2 * len(self._data), _FIRST_PIECE_BYTES))
            self._data += self._file.read_exactly(wanted - len(self._data))
        self._position = stop
        return start

    def _cut_short(self, num_bytes: int) -> NoReturn:
        size = self._stamp.size_bytes
        if self._position + num_bytes > size:
            left = size - self._position
            self._fail(f"needs {num_bytes} more bytes, but the file ends after {left}; fetch it again")
        self._fail(f"needs {num_bytes} more bytes, which passes the limit of {MAX_HEADER_BYTES} for a header")

    def _u32(self) -> int:
        start = self._take(4)
        value: int = _U32.unpack_from(self._data, start)[0]
        return value

    def _u64(self) -> int:
        start = self._take(8)
        value: int = _U64.unpack_from(self._data, start)[0]
        return value

    def _bytes(self, num_bytes: int) -> bytes:
        start = self._take(num_bytes)
        return self._data[start : start + num_bytes]

    def _name(self, kind: str) -> str:
        length = self._u64()
        if not 1 <= length <= MAX_NAME_BYTES:
            self._fail(f"{kind} name of {length} bytes; 1 to {MAX_NAME_BYTES} are possible")
        raw = self._bytes(length)
        try:
            return raw.decode("utf-8")
        except UnicodeDecodeError:
            self._fail(f"{kind} name {raw[:40]!r} is not UTF-8")

    def _version(self) -> int:
        if self._stamp.size_bytes < 8 or self._bytes(4) != MAGIC:
            self._fail('is not a GGUF file: it does not begin with "GGUF"')
        version = self._u32()
        if version in VERSIONS:
            return version
        if version & 0xFFFF == 0:
            self._fail("is a big-endian GGUF file; convert it to little-endian")
        self._fail(f"GGUF version {version} is not read here, only 2 and 3; convert the model again")

    def _count(self, what: str, count: int, limit: int, *, smallest_bytes: int) -> int:
        left = self._stamp.size_bytes - self._position
        if count * smallest_bytes > left:
            self._fail(f"claims {count} {what}, more than the {left} bytes that are left can hold")
        if count > limit:
            self._fail(f"claims {count} {what}; at most {limit} are read here")
        return count

    def _metadata(self, num_keys: int) -> dict[str, MetadataValue]:
        metadata: dict[str, MetadataValue] = {}
        for index in range(num_keys):
            self._field = f"key {index} of {num_keys}"
            name = self._name("key")
            self._field = name
            if name in metadata:
                self._fail("the key is there twice")
            metadata[name] = self._value(self._u32())
        return metadata

    def _value(self, value_type: int) -> MetadataValue:
        if value_type == _STRING:
            return self._bytes(self._u64()).decode("utf-8", "surrogateescape")
        if value_type == _ARRAY:
            return self._array()
        value = self._numbers(value_type, 1)[0]
        if value != value:
            self._fail("the value is not a number (NaN)")
        return value

    def _array(self) -> MetadataValue:
        value_type = self._u32()
        if value_type == _ARRAY:
            self._fail("arrays of arrays are not read here")
        smallest = 8 if value_type == _STRING else 1
        count = self._count("values", self._u64(), self._array_values_left, smallest_bytes=smallest)
        self._array_values_left -= count
        return self._strings(count) if value_type == _STRING else self._numbers(value_type, count)

    def _numbers(self, value_type: int, count: int) -> list[int] | list[float] | list[bool]:
        if value_type == _BOOL:
            raw = self._bytes(count)
            if raw.translate(None, b"\0\1"):
                self._fail("a bool is stored as something else than 0 or 1")
            return [byte == 1 for byte in raw]
        code = _NUMBER_CODES.get(value_type)
        if code is None:
            self._fail(f"value type {value_type} is unknown; 0 to 12 are possible")
        layout = struct.Struct(f"<{count}{code}")
        start = self._take(layout.size)
        return list(layout.unpack_from(self._data, start))

    def _strings(self, count: int) -> list[str]:
        # A vocabulary has up to 262,144 strings: this loop is the cost of a header, so it works on locals
        # and leaves all that is not plain, the end of the piece and of the file, to the methods above.
        data, known, position, field = self._data, len(self._data), self._position, self._field
        unpack = _U64.unpack_from
        strings: list[str] = []
        append = strings.append
        for index in range(count):
            start = position + 8
            if start > known or (stop := start + unpack(data, position)[0]) > known:
                self._position = position
                self._field = f"{field}[{index}]"
                self._take(self._u64())
                data, known, stop = self._data, len(self._data), self._position
            append(data[start:stop].decode("utf-8", "surrogateescape"))
            position = stop
        self._position = position
        self._field = field
        return strings

    def _alignment(self, metadata: Mapping[str, MetadataValue]) -> int:
        value = metadata.get("general.alignment", DEFAULT_ALIGNMENT)
        self._field = "general.alignment"
        if isinstance(value, int) and not isinstance(value, bool) and value >= 8 and value & (value - 1) == 0:
            return value
        self._fail(f"the alignment must be a power of two of at least 8 bytes, not {value!r:.40}")

    def _tensor_info(self, index: int) -> GgufTensor:
        """One tensor; its offset still counts from the start of the tensor data."""
        self._field = f"tensor {index}"
        name = self._name("tensor")
        self._field = name
        rank = self._u32()
        if rank > MAX_RANK:
            self._fail(f"has {rank} dimensions; at most {MAX_RANK} are possible")
        shape = tuple(self._u64() for _ in range(rank))[::-1]
        type_number = self._u32()
        try:
            ggml_type = GgmlType(type_number)
        except ValueError:
            self._fail(f"has tensor type {type_number}, which is unknown here")
        return GgufTensor(name, shape, ggml_type, self._u64(), self._num_bytes(shape, ggml_type))

    def _num_bytes(self, shape: tuple[int, ...], ggml_type: GgmlType) -> int:
        row = shape[-1] if shape else 1
        if row % ggml_type.block_size:
            self._fail(f"rows of {row} values are not whole {ggml_type.name} blocks of {ggml_type.block_size}")
        num_bytes = ggml_type.row_bytes(row)
        for size in shape[:-1]:
            num_bytes *= size
        if num_bytes == 0:
            self._fail(f"shape {shape} holds no values")
        return num_bytes

    def _place(self, infos: Iterable[GgufTensor], alignment: int, data_offset: int) -> dict[str, GgufTensor]:
        """Make offsets absolute and prove that tensors are apart and inside the file."""
        size = self._stamp.size_bytes
        tensors: dict[str, GgufTensor] = {}
        for info in infos:
            self._field = info.name
            if info.name in tensors:
                self._fail("the tensor is there twice")
            if info.offset % alignment:
                self._fail(f"lies at offset {info.offset}, not a multiple of the alignment {alignment}")
            offset = data_offset + info.offset
            if offset + info.num_bytes > size:
                end = offset + info.num_bytes
                self._fail(f"claims bytes {offset} to {end}, but the file ends at {size}; fetch it again")
            tensors[info.name] = GgufTensor(info.name, info.shape, info.ggml_type, offset, info.num_bytes)
        before: GgufTensor | None = None
        for tensor in sorted(tensors.values(), key=lambda tensor: tensor.offset):
            if before is not None and before.offset + before.num_bytes > tensor.offset:
                self._field = tensor.name
                self._fail(f"overlaps tensor {before.name:.256} at byte {tensor.offset}")
            before = tensor
        return tensors
