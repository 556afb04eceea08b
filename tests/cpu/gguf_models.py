"""Tiny models as GGUF files, converted here by hand from what the reference implementation saved.

Names, row order and norms follow llama.cpp's converters; nothing of ``weights/`` is used, so that the two can be wrong
only separately.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import safetensors.numpy
from numpy.typing import NDArray

Array = NDArray[np.float32]

NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "post_attention_layernorm": "ffn_norm",
}
GEMMA_NAMES = NAMES | {
    "post_attention_layernorm": "post_attention_norm",
    "pre_feedforward_layernorm": "ffn_norm",
    "post_feedforward_layernorm": "post_ffw_norm",
}


def saved_tensors(folder: Path) -> dict[str, Array]:
    """The tensors of a saved model by name."""
    return dict(safetensors.numpy.load_file(folder / "model.safetensors"))


def gguf_name(name: str, names: Mapping[str, str] = NAMES) -> str:
    """``model.layers.7.self_attn.q_proj.weight`` -> ``blk.7.attn_q.weight``."""
    stem, _, kind = name.rpartition(".")
    in_block = re.fullmatch(r"model\.layers\.(\d+)\.(.+)", stem)
    return f"blk.{in_block[1]}.{names[in_block[2]]}.{kind}" if in_block else f"{names[stem]}.{kind}"


def in_pairs(rows: Array, num_heads: int) -> Array:
    """The rows of queries or keys as llama's converter stores them: halves of a head interleaved."""
    return rows.reshape(num_heads, 2, -1, *rows.shape[1:]).swapaxes(1, 2).reshape(rows.shape)


def write(
    path: Path,
    architecture: str,
    keys: Mapping[str, Any],
    tensors: Mapping[str, Array],
    *,
    quantise: Callable[[str], bool] = lambda name: False,
    kind: str = "Q8_0",
) -> Path:
    """A GGUF of float32 tensors; those whose name ``quantise`` picks become ``kind``."""
    writer = gguf.GGUFWriter(path, architecture)
    for key, value in keys.items():
        add: dict[type, Callable[[str, Any], None]] = {
            bool: writer.add_bool,
            int: writer.add_uint32,
            float: writer.add_float32,
            str: writer.add_string,
            list: writer.add_array,
        }
        add[type(value)](f"{architecture}.{key}", value)
    for name, tensor in tensors.items():
        array = np.ascontiguousarray(tensor, dtype=np.float32)
        if quantise(name):
            blocks = gguf.quants.quantize(array, gguf.GGMLQuantizationType[kind])
            writer.add_tensor(name, blocks, raw_dtype=gguf.GGMLQuantizationType[kind])
        else:
            writer.add_tensor(name, array)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def keys_of(config: Any, head_dim: int) -> dict[str, Any]:
    """The keys that every converter writes for a transformers config."""
    return {
        "vocab_size": config.vocab_size,
        "context_length": config.max_position_embeddings,
        "embedding_length": config.hidden_size,
        "block_count": config.num_hidden_layers,
        "feed_forward_length": config.intermediate_size,
        "attention.head_count": config.num_attention_heads,
        "attention.head_count_kv": config.num_key_value_heads,
        "attention.layer_norm_rms_epsilon": config.rms_norm_eps,
        "attention.key_length": head_dim,
        "attention.value_length": head_dim,
    }
