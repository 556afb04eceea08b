"""The safetensors header reader against files written by hand, whole and broken."""

from __future__ import annotations

import hashlib
import json
import struct
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.artifact_files import safetensors_bytes, tensor_entry, write_folder
from troth.artifact import safetensors
from troth.artifact.safetensors import DTYPE_BITS, SafetensorsTensor, read_safetensors, read_shard
from troth.errors import ModelLoadError

INDEX = "model.safetensors.index.json"
ENTRIES = {
    "__metadata__": {"format": "pt"},
    "b": tensor_entry("BF16", [3], 16, 22),
    "a": tensor_entry("F32", [2, 2], 0, 16),
    "empty": tensor_entry("F32", [4, 0], 16, 16),
    "scalar": tensor_entry("I64", [], 22, 30),
}
WHOLE = safetensors_bytes(ENTRIES, bytes(30))


def write(tmp_path: Path, data: bytes) -> Path:
    path = tmp_path / "model.safetensors"
    path.write_bytes(data)
    return path


def refusal(read: Callable[[], object]) -> ModelLoadError:
    with pytest.raises(ModelLoadError) as caught:
        read()
    return caught.value


def at(root: Path) -> Callable[[str], Path]:
    return lambda name: root / name


def test_read_shard_returns_tensors_in_order_of_their_bytes(tmp_path: Path) -> None:
    shard = read_shard(write(tmp_path, WHOLE))
    base = len(WHOLE) - 30
    assert list(shard.tensors.values()) == [
        SafetensorsTensor("a", (2, 2), "F32", base, 16),
        SafetensorsTensor("empty", (4, 0), "F32", base + 16, 0),
        SafetensorsTensor("b", (3,), "BF16", base + 16, 6),
        SafetensorsTensor("scalar", (), "I64", base + 22, 8),
    ]
    assert shard.metadata == {"format": "pt"}
    assert shard.stamp.size_bytes == len(WHOLE)
    assert shard.sha256 == hashlib.sha256(WHOLE[8:base]).hexdigest()


def test_read_shard_accepts_every_dtype_of_the_format(tmp_path: Path) -> None:
    entries, position = {}, 0
    for dtype, bits in DTYPE_BITS.items():
        entries[dtype] = tensor_entry(dtype, [2, 4], position, position + bits)
        position += bits
    shard = read_shard(write(tmp_path, safetensors_bytes(entries, bytes(position))))
    assert {tensor.dtype for tensor in shard.tensors.values()} == set(DTYPE_BITS)


def test_read_shard_accepts_trailing_spaces_and_a_file_without_tensors(tmp_path: Path) -> None:
    assert read_shard(write(tmp_path, safetensors_bytes(b"{}      "))).tensors == {}


def test_read_shard_refuses_every_truncation_and_any_extension_of_a_file(tmp_path: Path) -> None:
    path = write(tmp_path, WHOLE)
    for data in [WHOLE[:size] for size in range(len(WHOLE))] + [WHOLE + b"\0"]:
        path.write_bytes(data)
        assert refusal(lambda: read_shard(path)).path == str(path)


def one(entry: Any, data: bytes = bytes(16)) -> bytes:
    return safetensors_bytes({"t": entry}, data)


@pytest.mark.parametrize(
    ("data", "field", "words"),
    [
        (safetensors_bytes(b"{}", length=2**63), "header", "not a safetensors file"),
        (safetensors_bytes(b"{}", length=0), "header", "not a safetensors file"),
        (safetensors_bytes(b"{}", b"xx", length=4), "header", "not JSON"),
        (safetensors_bytes(b"[]"), "header", "does not begin with {"),
        (safetensors_bytes(b" {}"), "header", "does not begin with {"),
        (safetensors_bytes(b'{"t": ' * 100), "header", "nested"),
        (safetensors_bytes(b'{"a": {}, "a": {}}'), "header", "twice"),
        (safetensors_bytes({"__metadata__": {"a": 1}}), "__metadata__", "strings"),
        (safetensors_bytes({"__metadata__": []}), "__metadata__", "strings"),
        (one([]), "t", "described by"),
        (one({"dtype": "F32", "shape": [4]}), "t", "described by"),
        (one({**tensor_entry("F32", [4], 0, 16), "extra": 1}), "t", "described by"),
        (one(tensor_entry("F33", [4], 0, 16)), "t", "'F33' is unknown"),
        (one({**tensor_entry("F32", [4], 0, 16), "dtype": ["F32"]}), "t", "is unknown"),
        (one({**tensor_entry("F32", [4], 0, 16), "shape": 4}), "t", "shape 4"),
        (one(tensor_entry("F32", [-4], 0, 16)), "t", "shape [-4]"),
        (one({**tensor_entry("F32", [4], 0, 16), "shape": [True, 4]}), "t", "shape [True, 4]"),
        (one({**tensor_entry("F32", [4], 0, 16), "shape": [4.0]}), "t", "shape [4.0]"),
        (one(tensor_entry("F32", [1] * 17, 0, 4)), "t", "at most 16 sizes"),
        (one(tensor_entry("F32", [2**64], 0, 16)), "t", "is not a list"),
        (one(tensor_entry("F32", [2**62, 2**62, 4], 0, 16)), "t", "does not take the 16 bytes"),
        (one(tensor_entry("F32", [2**32, 2**32], 0, 16)), "t", "does not take the 16 bytes"),
        (one(tensor_entry("F4", [3], 0, 1)), "t", "does not take the 1 bytes"),
        (one({**tensor_entry("F32", [4], 0, 16), "data_offsets": [0]}), "t", "a begin and an end"),
        (one({**tensor_entry("F32", [4], 0, 16), "data_offsets": [0, "16"]}), "t", "a begin and an end"),
        (one(tensor_entry("F32", [4], 16, 0)), "t", "a begin and an end"),
        (one(tensor_entry("F32", [4], -16, 0)), "t", "a begin and an end"),
        (one(tensor_entry("F32", [3], 4, 16)), "t", "hole"),
        (one(tensor_entry("F32", [5], 0, 20)), "header", "file ends"),
        (one(tensor_entry("F32", [3], 0, 12)), "header", "goes on"),
        (
            safetensors_bytes({"t": tensor_entry("U8", [9], 0, 9), "u": tensor_entry("U8", [8], 8, 16)}, bytes(16)),
            "u",
            "overlaps",
        ),
    ],
)
def test_read_shard_names_the_field_of_a_broken_file(tmp_path: Path, data: bytes, field: str, words: str) -> None:
    path = write(tmp_path, data)
    error = refusal(lambda: read_shard(path))
    assert (error.path, error.field) == (str(path), field)
    assert words in str(error)


def test_read_shard_keeps_a_hostile_name_out_of_the_message(tmp_path: Path) -> None:
    path = write(tmp_path, safetensors_bytes({"n" * 10**6: []}))
    assert refusal(lambda: read_shard(path)).field == "n" * 256


def test_read_shard_refuses_a_header_above_the_limit_before_reading_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write(tmp_path, WHOLE)
    monkeypatch.setattr(safetensors, "MAX_JSON_BYTES", 100)
    assert "at most 100 are read" in str(refusal(lambda: read_shard(path)))


def sharded() -> dict[str, Any]:
    return {
        INDEX: {
            "metadata": {"total_size": 24},
            "weight_map": {"a": "x-1.safetensors", "b": "x-2.safetensors"},
        },
        "x-1.safetensors": safetensors_bytes({"a": tensor_entry("F32", [4], 0, 16)}, bytes(16)),
        "x-2.safetensors": safetensors_bytes({"b": tensor_entry("F32", [2], 0, 8)}, bytes(8)),
    }


def test_read_safetensors_returns_the_shards_of_an_index_in_order(tmp_path: Path) -> None:
    headers = read_safetensors(write_folder(tmp_path, sharded()), at(tmp_path))
    assert [list(shard.tensors) for shard in headers.shards] == [["a"], ["b"]]
    assert headers.num_bytes == 24


def test_read_safetensors_opens_each_shard_once(tmp_path: Path) -> None:
    root = write_folder(tmp_path, sharded())
    opened: list[str] = []

    def locate(name: str) -> Path:
        opened.append(name)
        return root / name

    read_safetensors(root, locate)
    assert opened == [INDEX, "x-1.safetensors", "x-2.safetensors"]


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({INDEX: []}, "holds a list"),
        ({INDEX: {}}, "must map tensor names"),
        ({INDEX: {"weight_map": {}}}, "must map tensor names"),
        ({INDEX: {"weight_map": {"a": 1}}}, "names no safetensors file"),
        ({INDEX: {"weight_map": {"a": "../x-1.safetensors"}}}, "names no safetensors file"),
        ({INDEX: {"weight_map": {"a": "/x-1.safetensors"}}}, "names no safetensors file"),
        ({INDEX: {"weight_map": {"a": ".."}}}, "names no safetensors file"),
        ({INDEX: {"weight_map": {"a": "x\0.safetensors"}}}, "names no safetensors file"),
        ({INDEX: {"weight_map": {"a": "model.bin"}}}, "names no safetensors file"),
        ({INDEX: {"weight_map": {"a": "x-1.safetensors", "b": "x-3.safetensors"}}}, "no such file"),
        ({INDEX: {"weight_map": {"a": "x-2.safetensors", "b": "x-2.safetensors"}}}, "which it does not"),
        (
            {INDEX: {"weight_map": {"b": "x-2.safetensors", "c": "x-2.safetensors"}}},
            "x-2.safetensors holds c",
        ),
        ({"x-2.safetensors": sharded()["x-1.safetensors"]}, "holds b, which it does not"),
        (
            {
                "x-2.safetensors": safetensors_bytes(
                    {"a": tensor_entry("U8", [1], 0, 1), "b": tensor_entry("U8", [1], 1, 2)}, bytes(2)
                )
            },
            "puts a into x-1.safetensors, but x-2.safetensors holds it",
        ),
        ({"model.safetensors": WHOLE}, "model.safetensors is there too"),
    ],
)
def test_read_safetensors_refuses_an_index_that_disagrees_with_its_shards(
    tmp_path: Path, changes: dict[str, Any], words: str
) -> None:
    root = write_folder(tmp_path, sharded() | changes)
    error = refusal(lambda: read_safetensors(root, at(root)))
    assert words in str(error)
    assert error.path.startswith(str(root))


def test_read_safetensors_refuses_more_shards_than_its_bound(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    root = write_folder(tmp_path, sharded())
    monkeypatch.setattr(safetensors, "MAX_SHARDS", 1)
    assert "names 2 files" in str(refusal(lambda: read_safetensors(root, at(root))))


@pytest.fixture(scope="module")
def scratch(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("fuzz") / "model.safetensors"


TEXT = json.dumps(ENTRIES).encode()
PATCHES = st.one_of(
    st.binary(min_size=1, max_size=6),
    st.sampled_from(
        [b"[", b"]", b"{", b"}", b'"', b",", b"-1", b"1e999", b"NaN", b"18446744073709551616", b"null", b"\\"]
    ),
)
EDITS = st.lists(
    st.tuples(st.integers(0, len(TEXT)), st.sampled_from(["overwrite", "insert", "delete"]), PATCHES),
    min_size=1,
    max_size=4,
)


@settings(max_examples=150, deadline=None, database=None)
@given(edits=EDITS, lie=st.sampled_from([0, 0, 0, 1, -1, 2**40]), cut=st.integers(0, 40))
def test_read_shard_returns_or_raises_model_load_error_for_any_mutation(
    scratch: Path, edits: list[tuple[int, str, bytes]], lie: int, cut: int
) -> None:
    text = TEXT
    for position, kind, patch in edits:
        kept = position if kind == "insert" else position + len(patch)
        text = text[:position] + (b"" if kind == "delete" else patch) + text[kept:]
    data = struct.pack("<Q", len(text) + lie) + text + bytes(max(0, 30 - cut))
    scratch.write_bytes(data)
    try:
        shard = read_shard(scratch)
    except ModelLoadError:
        return
    spans = [(t.offset, t.offset + t.num_bytes) for t in shard.tensors.values()]
    assert all(before[1] == after[0] for before, after in pairwise(spans))
    assert not spans or spans[-1][1] == len(data)
