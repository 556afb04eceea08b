"""A model folder of a given shape with random weights, for speed alone: config, safetensors shards and a tokenizer.

    python -m benchmarks.random_model FOLDER --shape qwen3-8b

The tokenizer has the bytes and as many numbered words as the vocabulary needs.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any, Final

import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from torch import Tensor

_QWEN3: Final[dict[str, Any]] = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "head_dim": 128,
    "hidden_act": "silu",
    "attention_bias": False,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1e6,
    "max_position_embeddings": 40960,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
}
SHAPES: Final[dict[str, dict[str, Any]]] = {
    "qwen3-8b": _QWEN3
    | {
        "hidden_size": 4096,
        "intermediate_size": 12288,
        "num_hidden_layers": 36,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "vocab_size": 151936,
    },
    "qwen3-tiny": _QWEN3
    | {
        "hidden_size": 256,
        "intermediate_size": 512,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "vocab_size": 1024,
    },
}


def write(folder: Path, shape: str, *, device: str = "cpu", seed: int = 0) -> Path:
    """Write a model of one of ``SHAPES``; its bfloat16 numbers are drawn on ``device``, a shard at a time."""
    config = SHAPES[shape]
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    _write_tokenizer(folder / "tokenizer.json", config["vocab_size"])
    generator = torch.Generator(device).manual_seed(seed)
    shards = _shards(config)
    places: dict[str, str] = {}
    for number, shard in enumerate(shards, start=1):
        file = f"model-{number:05}-of-{len(shards):05}.safetensors"
        tensors = {name: _random(size, generator, device) for name, size in shard.items()}
        save_file(tensors, folder / file, metadata={"format": "pt"})
        places |= dict.fromkeys(shard, file)
    index = {"metadata": {}, "weight_map": places}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return folder


def _shards(config: dict[str, Any]) -> list[dict[str, tuple[int, ...]]]:
    """Names and sizes of the tensors: one shard per layer, and one for what is outside of them."""
    width, inner, head = config["hidden_size"], config["intermediate_size"], config["head_dim"]
    q_rows, kv_rows = (config[f"num_{kind}_heads"] * head for kind in ("attention", "key_value"))
    layer: dict[str, tuple[int, ...]] = {
        "input_layernorm.weight": (width,),
        "post_attention_layernorm.weight": (width,),
        "self_attn.q_norm.weight": (head,),
        "self_attn.k_norm.weight": (head,),
        "self_attn.q_proj.weight": (q_rows, width),
        "self_attn.k_proj.weight": (kv_rows, width),
        "self_attn.v_proj.weight": (kv_rows, width),
        "self_attn.o_proj.weight": (width, q_rows),
        "mlp.gate_proj.weight": (inner, width),
        "mlp.up_proj.weight": (inner, width),
        "mlp.down_proj.weight": (width, inner),
    }
    table = (config["vocab_size"], width)
    outside = {"model.embed_tokens.weight": table, "lm_head.weight": table, "model.norm.weight": (width,)}
    layers = range(config["num_hidden_layers"])
    return [outside, *({f"model.layers.{i}.{name}": size for name, size in layer.items()} for i in layers)]


def _random(size: tuple[int, ...], generator: torch.Generator, device: str) -> Tensor:
    if len(size) == 1:
        return torch.ones(size, dtype=torch.bfloat16)
    drawn = torch.empty(size, dtype=torch.bfloat16, device=device)
    return drawn.normal_(std=size[1] ** -0.5, generator=generator).cpu()


def _write_tokenizer(path: Path, vocab_size: int) -> None:
    pieces = sorted(pre_tokenizers.ByteLevel.alphabet())
    pieces += [f"Ġ{number}" for number in range(vocab_size - len(pieces))]
    tokenizer = Tokenizer(models.BPE({piece: i for i, piece in enumerate(pieces)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.save(str(path))


def main() -> None:
    """Write a folder."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--shape", choices=SHAPES, default="qwen3-8b")
    parser.add_argument("--device", default="cpu", help="where the numbers are drawn")
    arguments = parser.parse_args()
    write(arguments.folder, arguments.shape, device=arguments.device)


if __name__ == "__main__":
    main()
