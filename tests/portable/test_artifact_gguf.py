"""The GGUF header reader against files written by hand, whole and broken."""

from __future__ import annotations

import hashlib
import math
import os
import struct
import tracemalloc
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.artifact_files import (
    ARRAY,
    BOOL,
    F32,
    F64,
    GGML_F32,
    GGML_Q8_0,
    I8,
    I16,
    I32,
    I64,
    SMALL_KEYS,
    STRING,
    U8,
    U16,
    U32,
    U64,
    Key,
    TensorInfo,
    gguf_bytes,
)
from troth.artifact import gguf
from troth.artifact.ggml_types import GGML_BLOCKS, GgmlType
from troth.artifact.gguf import GgufTensor, read_gguf
from troth.errors import ModelLoadError

Q4_0 = 2


def write(tmp_path: Path, data: bytes) -> Path:
    path = tmp_path / "model.gguf"
    path.write_bytes(data)
    return path


def refusal(path: Path) -> ModelLoadError:
    """The error that reading ``path`` ends with; it must name the file."""
    with pytest.raises(ModelLoadError) as caught:
        read_gguf(path)
    assert caught.value.path == str(path)
    return caught.value


def test_read_gguf_returns_metadata_and_tensors_of_a_small_file(tmp_path: Path) -> None:
    data = gguf_bytes()
    header = read_gguf(write(tmp_path, data))
    assert header.version == 3
    assert header.alignment == 32
    assert header.data_offset == len(data) - 256
    assert list(header.metadata) == [name for name, _, _ in SMALL_KEYS]
    assert header.metadata["tokenizer.ggml.tokens"] == ["<s>", "a", "bc"]
    assert header.metadata["tokenizer.ggml.scores"] == [0.0, -1.0, -2.5]
    assert header.metadata["tokenizer.ggml.add_bos_token"] is True
    base = header.data_offset
    assert header.tensors == {
        "token_embd.weight": GgufTensor("token_embd.weight", (3, 32), GgmlType.Q8_0, base, 3 * 34),
        "output_norm.weight": GgufTensor("output_norm.weight", (32,), GgmlType.F32, base + 128, 128),
    }


def test_read_gguf_accepts_version_2_which_has_the_same_layout(tmp_path: Path) -> None:
    header = read_gguf(write(tmp_path, gguf_bytes(version=2)))
    assert header.version == 2
    assert len(header.tensors) == 2


@pytest.mark.parametrize(
    ("value_type", "values"),
    [
        (U8, [0, 255]),
        (I8, [-128, 127]),
        (U16, [0, 65535]),
        (I16, [-32768, 32767]),
        (U32, [0, 2**32 - 1]),
        (I32, [-(2**31), 2**31 - 1]),
        (U64, [0, 2**64 - 1]),
        (I64, [-(2**63), 2**63 - 1]),
        (F32, [0.5, -math.inf]),
        (F64, [0.1, 1e300]),
        (BOOL, [True, False]),
        (STRING, ["", "naïve 模型"]),
    ],
)
def test_read_gguf_returns_python_values_of_every_type_alone_and_in_arrays(
    tmp_path: Path, value_type: int, values: list[object]
) -> None:
    keys: list[Key] = [(f"one.{i}", value_type, value) for i, value in enumerate(values)]
    keys += [("many", ARRAY, (value_type, values)), ("none", ARRAY, (value_type, []))]
    metadata = read_gguf(write(tmp_path, gguf_bytes(keys, [], b""))).metadata
    assert [metadata["one.0"], metadata["one.1"]] == values
    assert metadata["many"] == values
    assert metadata["none"] == []
    assert [type(value) for value in metadata["many"]] == [type(value) for value in values]


def test_read_gguf_keeps_the_bytes_of_strings_that_are_not_utf8(tmp_path: Path) -> None:
    pieces = [b"\xff\xfe", b"ok", b"\xed\xa0\x80", b"\xc3"]
    header = read_gguf(write(tmp_path, gguf_bytes([("tokens", ARRAY, (STRING, pieces))], [], b"")))
    tokens = header.metadata["tokens"]
    assert isinstance(tokens, list)
    assert [str(token).encode("utf-8", "surrogateescape") for token in tokens] == pieces


def test_read_gguf_returns_shapes_outermost_first_and_offsets_from_the_start_of_the_file(
    tmp_path: Path,
) -> None:
    infos: list[TensorInfo] = [
        ("scalar", (), GGML_F32, 0),
        ("experts", (2, 3, 64), GGML_Q8_0, 64),
        ("four", (2, 1, 1, 32), Q4_0, 512),
    ]
    data = gguf_bytes([("general.alignment", U32, 64)], infos, bytes(576), alignment=64)
    header = read_gguf(write(tmp_path, data))
    assert header.alignment == 64
    assert header.data_offset % 64 == 0
    assert [(t.shape, t.offset - header.data_offset, t.num_bytes) for t in header.tensors.values()] == [
        ((), 0, 4),
        ((2, 3, 64), 64, 2 * 3 * 68),
        ((2, 1, 1, 32), 512, 36),
    ]


def test_read_gguf_digests_the_header_and_not_the_tensor_data(tmp_path: Path) -> None:
    infos_end = len(gguf_bytes(data=b"", alignment=1))
    first = read_gguf(write(tmp_path, gguf_bytes()))
    assert first.sha256 == hashlib.sha256(gguf_bytes()[:infos_end]).hexdigest()
    assert read_gguf(write(tmp_path, gguf_bytes(data=bytes(256)))).sha256 == first.sha256


def test_read_gguf_follows_a_symbolic_link_named_by_the_caller(tmp_path: Path) -> None:
    target = write(tmp_path, gguf_bytes())
    link = tmp_path / "link.gguf"
    link.symlink_to(target)
    assert read_gguf(str(link)).path == target


def test_gguf_header_repr_stays_short_whatever_the_vocabulary(tmp_path: Path) -> None:
    keys: list[Key] = [("tokens", ARRAY, (STRING, ["piece"] * 5000))]
    assert len(repr(read_gguf(write(tmp_path, gguf_bytes(keys, [], b""))))) < 1000


def test_every_ggml_type_has_a_block_size() -> None:
    assert set(GGML_BLOCKS) == set(GgmlType)
    assert all(size >= 1 and num_bytes >= 1 for size, num_bytes in GGML_BLOCKS.values())


def test_read_gguf_refuses_every_truncation_of_a_file(tmp_path: Path) -> None:
    data = gguf_bytes()
    path = tmp_path / "cut.gguf"
    for size in [*range(len(data) - 256), *range(len(data) - 256, len(data), 15)]:
        path.write_bytes(data[:size])
        assert refusal(path)


@pytest.mark.parametrize(
    ("data", "field", "words"),
    [
        (gguf_bytes(magic=b"GGML"), "header", "not a GGUF file"),
        (b"PK\3\4" + bytes(100), "header", "not a GGUF file"),
        (gguf_bytes(version=1), "header", "version 1 "),
        (gguf_bytes(version=99), "header", "version 99"),
        (gguf_bytes(version=3 << 24), "header", "big-endian"),
        (gguf_bytes(num_tensors=2**63), "header", f"claims {2**63} tensors"),
        (gguf_bytes(num_keys=2**64 - 1), "header", f"claims {2**64 - 1} keys"),
        (gguf_bytes(tensors=[], num_keys=9), "key 8 of 9", "name of"),
        (gguf_bytes(num_tensors=3), "tensor 2", "name of"),
        (gguf_bytes([(b"", U8, 1)]), "key 0 of 1", "name of 0 bytes"),
        (gguf_bytes([(b"\xff", U8, 1)]), "key 0 of 1", "not UTF-8"),
        (gguf_bytes([("a" * 70000, U8, 1)]), "key 0 of 1", "name of 70000 bytes"),
        (gguf_bytes([("k", U8, 1), ("k", U8, 1)]), "k", "twice"),
        (gguf_bytes([("k", 13, 0)]), "k", "value type 13"),
        (gguf_bytes([("k", ARRAY, (13, []))]), "k", "value type 13"),
        (gguf_bytes([("k", ARRAY, (ARRAY, []))]), "k", "arrays of arrays"),
        (gguf_bytes([("k", F32, math.nan)]), "k", "NaN"),
        (gguf_bytes([("k", BOOL, True)]).replace(b"\7\0\0\0\1", b"\7\0\0\0\2"), "k", "bool"),
        (gguf_bytes([("general.alignment", U32, 0)]), "general.alignment", "power of two"),
        (gguf_bytes([("general.alignment", U32, 4)]), "general.alignment", "power of two"),
        (gguf_bytes([("general.alignment", U32, 48)]), "general.alignment", "power of two"),
        (gguf_bytes([("general.alignment", STRING, "32")]), "general.alignment", "power of two"),
        (gguf_bytes([("general.alignment", BOOL, True)]), "general.alignment", "power of two"),
        (gguf_bytes([("general.alignment", U64, 2**62)]), "token_embd.weight", "file ends"),
        (gguf_bytes(tensors=[(b"\xff", (1,), 0, 0)]), "tensor 0", "not UTF-8"),
        (gguf_bytes(tensors=[("t", (1, 1, 1, 1, 1), 0, 0)]), "t", "5 dimensions"),
        (gguf_bytes(tensors=[("t", (1,), 4, 0)]), "t", "type 4"),
        (gguf_bytes(tensors=[("t", (1,), 999, 0)]), "t", "type 999"),
        (gguf_bytes(tensors=[("t", (2, 33), GGML_Q8_0, 0)]), "t", "whole Q8_0 blocks"),
        (gguf_bytes(tensors=[("t", (), GGML_Q8_0, 0)]), "t", "whole Q8_0 blocks"),
        (gguf_bytes(tensors=[("t", (4, 0), 0, 0)]), "t", "no values"),
        (gguf_bytes(tensors=[("t", (0, 4), 0, 0)]), "t", "no values"),
        (gguf_bytes(tensors=[("t", (2**63, 2**63, 2**63, 2**63), 0, 0)]), "t", "file ends"),
        (gguf_bytes(tensors=[("t", (2**62, 4), 0, 0)]), "t", "file ends"),
        (gguf_bytes(tensors=[("t", (65,), 0, 0)]), "t", "file ends"),
        (gguf_bytes(tensors=[("t", (1,), 0, 2**64 - 32)]), "t", "file ends"),
        (gguf_bytes(tensors=[("t", (1,), 0, 4)]), "t", "multiple of the alignment"),
        (gguf_bytes(tensors=[("t", (9,), 0, 0), ("u", (1,), 0, 32)]), "u", "overlaps tensor t"),
        (gguf_bytes(tensors=[("t", (9,), 0, 0), ("u", (9,), 0, 0)]), "u", "overlaps tensor t"),
        (gguf_bytes(tensors=[("t", (1,), 0, 0), ("t", (1,), 0, 32)]), "t", "twice"),
    ],
)
def test_read_gguf_names_the_field_of_a_broken_file(tmp_path: Path, data: bytes, field: str, words: str) -> None:
    error = refusal(write(tmp_path, data))
    assert error.field == field
    assert words in str(error)


def test_read_gguf_keeps_a_hostile_name_out_of_the_message(tmp_path: Path) -> None:
    error = refusal(write(tmp_path, gguf_bytes([("k" * 60000, 13, 0)])))
    assert error.field == "k" * 256


def test_read_gguf_reads_on_wherever_a_piece_of_the_header_ends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write(tmp_path, gguf_bytes())
    whole = read_gguf(path)
    for size in range(1, 200):
        monkeypatch.setattr(gguf, "_FIRST_PIECE_BYTES", size)
        assert read_gguf(path) == whole


def test_read_gguf_names_the_string_of_an_array_that_runs_out(tmp_path: Path) -> None:
    whole = gguf_bytes([("tokens", ARRAY, (STRING, ["aaaa", "bbbb", "cccc"]))], [], b"")
    cut = whole[: whole.index(b"bbbb") + 4 + 3]
    assert refusal(write(tmp_path, cut)).field == "tokens[2]"
    liar = whole.replace(struct.pack("<Q", 4) + b"bbbb", struct.pack("<Q", 2**64 - 1) + b"bbbb")
    error = refusal(write(tmp_path, liar))
    assert error.field == "tokens[1]"
    assert "file ends" in str(error)


@pytest.mark.parametrize("claim", [2**20, 2**40, 2**64 - 1])
def test_read_gguf_allocates_nothing_for_values_that_are_not_there(tmp_path: Path, claim: int) -> None:
    counts = struct.pack("<IQ", STRING, 1)
    lying = struct.pack("<IQ", STRING, claim)
    path = write(tmp_path, gguf_bytes([("k", ARRAY, (STRING, ["x"]))], [], b"").replace(counts, lying))
    tracemalloc.start()
    try:
        error = refusal(path)
        peak_bytes = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert f"claims {claim} values" in str(error)
    assert peak_bytes < 2**20


def test_read_gguf_refuses_headers_beyond_its_bounds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write(tmp_path, gguf_bytes())
    for name, bound, words in (
        ("MAX_ARRAY_VALUES", 5, "at most 2 are read"),
        ("MAX_KEYS", 3, "at most 3 are read"),
        ("MAX_TENSORS", 1, "at most 1 are read"),
        ("MAX_HEADER_BYTES", 200, "limit of 200"),
    ):
        with monkeypatch.context() as patch:
            patch.setattr(gguf, name, bound)
            assert words in str(refusal(path))
    assert read_gguf(path).version == 3


def test_read_gguf_refuses_what_is_no_readable_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert "no such file" in str(refusal(tmp_path / "missing.gguf"))
    assert "not a regular file" in str(refusal(tmp_path))
    assert "not a GGUF file" in str(refusal(write(tmp_path, b"")))
    pipe = tmp_path / "pipe.gguf"
    os.mkfifo(pipe)
    assert "not a regular file" in str(refusal(pipe))

    def denied(path: object, flags: int) -> int:
        raise PermissionError(13, "Permission denied")

    locked = write(tmp_path, gguf_bytes())
    with monkeypatch.context() as patch:
        patch.setattr(os, "open", denied)
        error = refusal(locked)
    assert "Permission denied" in str(error)


@pytest.fixture(scope="module")
def scratch(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("fuzz") / "fuzz.gguf"


WHOLE = gguf_bytes()
EDGES = st.sampled_from([0, 1, 7, 8, 9, 31, 32, 2**31, 2**32 - 1, 2**32, 2**62, 2**63 - 1, 2**63, 2**64 - 1])
PATCHES = st.one_of(
    st.binary(min_size=1, max_size=12),
    EDGES.map(lambda value: struct.pack("<Q", value)),
    EDGES.map(lambda value: struct.pack("<I", value & 0xFFFFFFFF)),
)
EDITS = st.lists(
    st.tuples(st.integers(0, len(WHOLE)), st.sampled_from(["overwrite", "insert", "delete", "cut"]), PATCHES),
    min_size=1,
    max_size=4,
)


@settings(max_examples=150, deadline=None, database=None)
@given(edits=EDITS)
def test_read_gguf_returns_or_raises_model_load_error_for_any_mutation(
    scratch: Path, edits: list[tuple[int, str, bytes]]
) -> None:
    data = WHOLE
    for position, kind, patch in edits:
        if kind == "cut":
            data = data[:position]
        else:
            kept = position if kind == "insert" else position + len(patch)
            data = data[:position] + (b"" if kind == "delete" else patch) + data[kept:]
    scratch.write_bytes(data)
    try:
        header = read_gguf(scratch)
    except ModelLoadError:
        return
    spans = sorted((t.offset, t.offset + t.num_bytes) for t in header.tensors.values())
    assert all(header.data_offset <= begin < end <= len(data) for begin, end in spans)
    assert all(before[1] <= after[0] for before, after in pairwise(spans))
