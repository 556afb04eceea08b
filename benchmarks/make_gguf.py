"""Makes GGUF files of other types to measure on: from the demo model's weights, or random ones of a larger shape.

Written to a folder of your own, never to the repository. Formats whose blocks are 256 numbers long fall back to one of
32 for rows that are no multiple of 256, as llama.cpp's own tool does. The gguf package quantises to the simple formats;
the two K formats below are rounded without a search for better scales: as fast to read, a little less accurate.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Final

import gguf
import numpy as np
from gguf import GGMLQuantizationType as Type
from numpy.typing import NDArray

from troth import compose
from troth.config.options import ModelOptions

Floats = NDArray[np.float32]
Bytes = NDArray[np.uint8]

SUPER_BLOCK: Final = 256
FALLBACK: Final = {Type.Q6_K: Type.Q8_0, Type.Q4_K: Type.Q5_0}
TYPES: Final = ("Q8_0", "Q4_0", "Q6_K", "Q4_K")
SHAPE: Final = {
    "block_count": 28,
    "context_length": 4096,
    "embedding_length": 1024,
    "feed_forward_length": 3072,
    "attention.head_count": 16,
    "attention.head_count_kv": 8,
    "attention.key_length": 128,
    "attention.value_length": 128,
}
"""Qwen3-0.6B: 151,936 tokens, embedding and head tied."""
VOCABULARY: Final = 151_936
PADDING_TOKEN: Final = 5
"""Token type of entries that no text has (gguf.TokenType.UNUSED)."""
COPIED: Final = "tokenizer."
PIECE_ROWS: Final = 4096
"""Rows quantised together."""


def main() -> None:
    """Write the files and say where they are."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path, help="where the files go")
    parser.add_argument("--types", nargs="+", default=list(TYPES), choices=TYPES)
    parser.add_argument("--weights", nargs="+", default=["demo", "qwen3-0.6b"], choices=("demo", "qwen3-0.6b"))
    arguments = parser.parse_args()
    arguments.folder.mkdir(parents=True, exist_ok=True)
    source = gguf.GGUFReader(compose.find(ModelOptions()).files[0].path)
    for weights in arguments.weights:
        for name in arguments.types:
            path = arguments.folder / f"{weights}-{name.lower()}.gguf"
            (demo if weights == "demo" else random_qwen3)(source, Type[name], path)
            print(f"{path}  {path.stat().st_size / 1e6:.1f} MB")


def demo(source: gguf.GGUFReader, wanted: Type, path: Path) -> None:
    """The demo model with its matrices in another type; everything else as it is."""
    writer = gguf.GGUFWriter(path, str(source.fields["general.architecture"].contents()), use_temp_file=True)
    copy_fields(
        source, writer, lambda name: not name.startswith(("GGUF.", "general.architecture", "general.file_type"))
    )
    for tensor in source.tensors:
        numbers = gguf.quants.dequantize(tensor.data, tensor.tensor_type).reshape(tensor.shape[::-1])
        add(writer, tensor.name, numbers.astype(np.float32), wanted)
    finish(writer)


def random_qwen3(source: gguf.GGUFReader, wanted: Type, path: Path) -> None:
    """Random weights of the shape of Qwen3-0.6B, with the demo model's tokenizer filled up to its vocabulary."""
    writer = gguf.GGUFWriter(path, "qwen3", use_temp_file=True)
    for name, number in SHAPE.items():
        writer.add_uint32(f"qwen3.{name}", number)
    writer.add_float32("qwen3.rope.freq_base", 1e6)
    writer.add_float32("qwen3.attention.layer_norm_rms_epsilon", 1e-6)
    lists = ("tokenizer.ggml.tokens", "tokenizer.ggml.token_type")
    copy_fields(source, writer, lambda name: name.startswith(COPIED) and name not in lists)
    tokens, types = (list(source.fields[name].contents()) for name in lists)
    missing = VOCABULARY - len(tokens)
    writer.add_token_list([*tokens, *(f"<|unused {index}|>" for index in range(missing))])
    writer.add_token_types([*types, *[PADDING_TOKEN] * missing])
    random = np.random.default_rng(0)
    for name, shape in qwen3_tensors():
        if len(shape) == 1:
            add(writer, name, np.ones(shape, dtype=np.float32), wanted)
        else:
            add(writer, name, random.standard_normal(shape, dtype=np.float32) * np.float32(shape[1] ** -0.5), wanted)
    finish(writer)


def qwen3_tensors() -> Iterator[tuple[str, tuple[int, ...]]]:
    """Names and shapes, rows first."""
    width, inner = SHAPE["embedding_length"], SHAPE["feed_forward_length"]
    head = SHAPE["attention.key_length"]
    queries, keys = SHAPE["attention.head_count"] * head, SHAPE["attention.head_count_kv"] * head
    yield "token_embd.weight", (VOCABULARY, width)
    yield "output_norm.weight", (width,)
    for layer in range(SHAPE["block_count"]):
        for name, shape in {
            "attn_norm": (width,),
            "ffn_norm": (width,),
            "attn_q_norm": (head,),
            "attn_k_norm": (head,),
            "attn_q": (queries, width),
            "attn_k": (keys, width),
            "attn_v": (keys, width),
            "attn_output": (width, queries),
            "ffn_gate": (inner, width),
            "ffn_up": (inner, width),
            "ffn_down": (width, inner),
        }.items():
            yield f"blk.{layer}.{name}.weight", shape


def copy_fields(source: gguf.GGUFReader, writer: gguf.GGUFWriter, takes: Callable[[str], bool]) -> None:
    """Metadata whose name is taken, with its types."""
    for name, field in source.fields.items():
        if takes(name):
            inner = field.types[-1] if field.types[0] == gguf.GGUFValueType.ARRAY else None
            writer.add_key_value(name, field.contents(), field.types[0], sub_type=inner)


def add(writer: gguf.GGUFWriter, name: str, numbers: Floats, wanted: Type) -> None:
    """A matrix quantised, a vector as float32."""
    if numbers.ndim == 1:
        writer.add_tensor(name, numbers)
        return
    if wanted in FALLBACK and numbers.shape[1] % SUPER_BLOCK:
        wanted = FALLBACK[wanted]
    parts = [quantize(numbers[at : at + PIECE_ROWS], wanted) for at in range(0, len(numbers), PIECE_ROWS)]
    writer.add_tensor(name, np.concatenate(parts), raw_dtype=wanted)


def quantize(numbers: Floats, wanted: Type) -> Bytes:
    """Rows [O, I] as blocks, [O, bytes of a row]."""
    if wanted not in _K_FORMATS:
        simple: Bytes = gguf.quants.quantize(numbers, wanted)
        return simple
    blocks = _K_FORMATS[wanted](numbers.reshape(-1, SUPER_BLOCK))
    return blocks.reshape(len(numbers), -1)


def to_q6_k(x: Floats) -> Bytes:
    """Blocks [N, 256] as Q6_K: 16 groups of 16 numbers, q * scale * d with q in -32 .. 31 (layout: ggml-common.h)."""
    groups = x.reshape(-1, 16, 16)
    wanted = np.abs(groups).max(axis=2) / 31
    d = _half(wanted.max(axis=1, keepdims=True) / 127)
    scale = np.rint(_divided(wanted, d)).clip(1, 127)
    q = (np.rint(_divided(groups, (scale * d)[:, :, None])).clip(-32, 31) + 32).astype(np.uint8)
    # In each half of 128: number 32 j + l has its low four bits in one of 64 bytes, its high two in byte l of 32.
    q = q.reshape(-1, 2, 4, 32)
    low = q[:, :, :2] & 15 | (q[:, :, 2:] & 15) << 4
    high = q >> 4
    high = high[:, :, 0] | high[:, :, 1] << 2 | high[:, :, 2] << 4 | high[:, :, 3] << 6
    parts = (low, high, scale.astype(np.int8).view(np.uint8), d.astype(np.float16).view(np.uint8))
    return np.concatenate([part.reshape(len(x), -1) for part in parts], axis=1)


def to_q4_k(x: Floats) -> Bytes:
    """Blocks [N, 256] as Q4_K: 8 groups of 32 numbers, q * scale * d - minimum * dmin (layout: ggml-common.h)."""
    groups = x.reshape(-1, 8, 32)
    lowest = np.minimum(groups.min(axis=2), 0)
    wanted = (groups.max(axis=2) - lowest) / 15
    d, dmin = (_half(of.max(axis=1, keepdims=True) / 63) for of in (wanted, -lowest))
    scale, minimum = np.rint(_divided(wanted, d)).clip(0, 63), np.rint(_divided(-lowest, dmin)).clip(0, 63)
    steps = _divided(groups + (minimum * dmin)[:, :, None], (scale * d)[:, :, None])
    q = np.rint(steps).clip(0, 15).astype(np.uint8).reshape(-1, 4, 2, 32)
    s, m = scale.astype(np.uint8), minimum.astype(np.uint8)
    # Six bits each in twelve bytes: of groups 4 .. 7 the upper two lie above those of groups 0 .. 3.
    sixes = (
        s[:, :4] | (s[:, 4:] >> 4) << 6,
        m[:, :4] | (m[:, 4:] >> 4) << 6,
        s[:, 4:] & 15 | (m[:, 4:] & 15) << 4,
    )
    halves = (half.astype(np.float16).view(np.uint8) for half in (d, dmin))
    parts = (*halves, *sixes, q[:, :, 0] | q[:, :, 1] << 4)
    return np.concatenate([part.reshape(len(x), -1) for part in parts], axis=1)


def _half(x: Floats) -> Floats:
    """Rounded to what a float16 holds."""
    return x.astype(np.float16).astype(np.float32)


def _divided(x: Floats, by: Floats) -> Floats:
    """x / by, and 0 where ``by`` is."""
    return np.divide(x, by, out=np.zeros(np.broadcast_shapes(x.shape, by.shape), np.float32), where=by != 0)


_K_FORMATS: Final[dict[Any, Callable[[Floats], Bytes]]] = {Type.Q6_K: to_q6_k, Type.Q4_K: to_q4_k}


def finish(writer: gguf.GGUFWriter) -> None:
    """Write everything out."""
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


if __name__ == "__main__":
    main()
