"""Small model files written by hand, byte for byte, so that tests can also write broken ones. No torch."""

from __future__ import annotations

import json
import struct
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

U8, I8, U16, I16, U32, I32, F32, BOOL, STRING, ARRAY, U64, I64, F64 = range(13)
NUMBER_CODES = {
    U8: "B",
    I8: "b",
    U16: "H",
    I16: "h",
    U32: "I",
    I32: "i",
    F32: "f",
    BOOL: "?",
    U64: "Q",
    I64: "q",
    F64: "d",
}
GGML_F32, GGML_Q8_0 = 0, 8

Key = tuple[str | bytes, int, Any]
"""(name, value type, value); an array's value is (value type, items)."""
TensorInfo = tuple[str | bytes, tuple[int, ...], int, int]
"""(name, row-major shape, ggml type, offset)."""

SMALL_KEYS: tuple[Key, ...] = (
    ("general.architecture", STRING, "llama"),
    ("general.name", STRING, "pebble"),
    ("llama.block_count", U32, 1),
    ("llama.rope.freq_base", F32, 10000.0),
    ("tokenizer.ggml.tokens", ARRAY, (STRING, ["<s>", "a", "bc"])),
    ("tokenizer.ggml.scores", ARRAY, (F32, [0.0, -1.0, -2.5])),
    ("tokenizer.ggml.add_bos_token", BOOL, True),
    ("tokenizer.chat_template", STRING, "{{ messages }}"),
)
SMALL_TENSORS: tuple[TensorInfo, ...] = (
    ("token_embd.weight", (3, 32), GGML_Q8_0, 0),
    ("output_norm.weight", (32,), GGML_F32, 128),
)


def gguf_string(text: str | bytes) -> bytes:
    """Length and bytes."""
    raw = text if isinstance(text, bytes) else text.encode()
    return struct.pack("<Q", len(raw)) + raw


def gguf_value(value_type: int, value: Any) -> bytes:
    """One value without its type; unknown types get no bytes."""
    if value_type == STRING:
        return gguf_string(value)
    if value_type == ARRAY:
        item_type, items = value
        return struct.pack("<IQ", item_type, len(items)) + b"".join(gguf_value(item_type, item) for item in items)
    code = NUMBER_CODES.get(value_type)
    return b"" if code is None else struct.pack("<" + code, value)


def gguf_bytes(
    keys: Iterable[Key] = SMALL_KEYS,
    tensors: Iterable[TensorInfo] = SMALL_TENSORS,
    data: bytes = bytes(range(256)),
    *,
    magic: bytes = b"GGUF",
    version: int = 3,
    num_tensors: int | None = None,
    num_keys: int | None = None,
    alignment: int = 32,
) -> bytes:
    """A GGUF file; counts other than the true ones make a lying header."""
    keys, tensors = list(keys), list(tensors)
    parts = [magic, struct.pack("<I", version)]
    parts.append(struct.pack("<Q", len(tensors) if num_tensors is None else num_tensors))
    parts.append(struct.pack("<Q", len(keys) if num_keys is None else num_keys))
    for name, value_type, value in keys:
        parts += [gguf_string(name), struct.pack("<I", value_type), gguf_value(value_type, value)]
    for name, shape, ggml_type, offset in tensors:
        dims = b"".join(struct.pack("<Q", size) for size in reversed(shape))
        parts += [
            gguf_string(name),
            struct.pack("<I", len(shape)),
            dims,
            struct.pack("<IQ", ggml_type, offset),
        ]
    header = b"".join(parts)
    return header + bytes(-len(header) % alignment) + data


def safetensors_bytes(header: Mapping[str, Any] | bytes, data: bytes = b"", *, length: int | None = None) -> bytes:
    """A safetensors file; a ``length`` other than the true one makes a lying header."""
    raw = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(raw) if length is None else length) + raw + data


def tensor_entry(dtype: str, shape: list[int], begin: int, end: int) -> dict[str, Any]:
    """One entry of a safetensors header."""
    return {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}


def write_folder(root: Path, files: Mapping[str, Any]) -> Path:
    """A folder of files: bytes and strings as they are, everything else as JSON."""
    root.mkdir(parents=True, exist_ok=True)
    for name, content in files.items():
        place = root / name
        place.parent.mkdir(parents=True, exist_ok=True)
        if isinstance(content, bytes):
            place.write_bytes(content)
        else:
            place.write_text(content if isinstance(content, str) else json.dumps(content), encoding="utf-8")
    return root


def small_model_files() -> dict[str, Any]:
    """The files of a tiny safetensors model in one shard."""
    entries = {"a": tensor_entry("F32", [2, 2], 0, 16), "b": tensor_entry("BF16", [3], 16, 22)}
    return {
        "config.json": {"model_type": "pebble", "hidden_size": 2},
        "generation_config.json": {"eos_token_id": [1, 2]},
        "tokenizer.json": {"model": {}},
        "tokenizer_config.json": {"chat_template": "from tokenizer_config"},
        "model.safetensors": safetensors_bytes(entries, bytes(range(22))),
    }
