"""A model folder of a given shape with random weights, for speed alone: config, safetensors shards and a tokenizer.

    python -m benchmarks.random_model FOLDER --shape qwen3-8b

The tokenizer has the bytes and as many numbered words as the vocabulary needs. Qwen3.5's shapes have a draft head, and
weights under which each token is followed by the next one of the vocabulary, whatever rounding does: so answers with
drafts can be compared to those without. Speed is that of any weights.
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
_QWEN3_5: Final[dict[str, Any]] = {
    "architectures": ["Qwen3_5ForCausalLM"],
    "model_type": "qwen3_5_text",
    "head_dim": 256,
    "hidden_act": "silu",
    "attention_bias": False,
    "attn_output_gate": True,
    "full_attention_interval": 4,
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_num_key_heads": 16,
    "mtp_num_hidden_layers": 1,
    "rms_norm_eps": 1e-6,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e7, "partial_rotary_factor": 0.25},
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
    "qwen3.5-0.8b": _QWEN3_5
    | {
        "hidden_size": 1024,
        "intermediate_size": 3584,
        "num_hidden_layers": 24,
        "num_attention_heads": 8,
        "num_key_value_heads": 2,
        "linear_num_value_heads": 16,
        "vocab_size": 248320,
    },
    "qwen3.5-4b": _QWEN3_5
    | {
        "hidden_size": 2560,
        "intermediate_size": 9216,
        "num_hidden_layers": 32,
        "num_attention_heads": 16,
        "num_key_value_heads": 4,
        "linear_num_value_heads": 32,
        "vocab_size": 248320,
    },
    "qwen3.5-tiny": _QWEN3_5
    | {
        "hidden_size": 128,
        "intermediate_size": 256,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 64,
        "linear_key_head_dim": 32,
        "linear_value_head_dim": 32,
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
        "vocab_size": 1024,
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
        if config["model_type"] == _QWEN3_5["model_type"]:
            _make_sure(tensors, config)
        save_file(tensors, folder / file, metadata={"format": "pt"})
        places |= dict.fromkeys(shard, file)
    index = {"metadata": {}, "weight_map": places}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return folder


def _shards(config: dict[str, Any]) -> list[dict[str, tuple[int, ...]]]:
    """Names and sizes of the tensors: one shard per layer, and one for what is outside of them."""
    width, hybrid = config["hidden_size"], config["model_type"] == _QWEN3_5["model_type"]
    table = (config["vocab_size"], width)
    outside = {"model.embed_tokens.weight": table, "lm_head.weight": table, "model.norm.weight": (width,)}
    if hybrid:
        outside |= {"mtp.fc.weight": (width, 2 * width)}
        outside |= {f"mtp.{name}.weight": (width,) for name in ("pre_fc_norm_embedding", "pre_fc_norm_hidden", "norm")}
        outside |= {f"mtp.layers.0.{name}": size for name, size in (_attention(config) | _mlp(config)).items()}
    shards = [outside]
    for i in range(config["num_hidden_layers"]):
        recurrent = hybrid and (i + 1) % config["full_attention_interval"]
        layer = (_delta_net(config) if recurrent else _attention(config)) | _mlp(config)
        shards.append({f"model.layers.{i}.{name}": size for name, size in layer.items()})
    return shards


def _attention(config: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    width, head = config["hidden_size"], config["head_dim"]
    q_rows, kv_rows = (config[f"num_{kind}_heads"] * head for kind in ("attention", "key_value"))
    return {
        "self_attn.q_norm.weight": (head,),
        "self_attn.k_norm.weight": (head,),
        "self_attn.q_proj.weight": (q_rows * (2 if config.get("attn_output_gate") else 1), width),
        "self_attn.k_proj.weight": (kv_rows, width),
        "self_attn.v_proj.weight": (kv_rows, width),
        "self_attn.o_proj.weight": (width, q_rows),
    }


def _delta_net(config: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    width, heads = config["hidden_size"], config["linear_num_value_heads"]
    values = heads * config["linear_value_head_dim"]
    channels = 2 * config["linear_num_key_heads"] * config["linear_key_head_dim"] + values
    return {
        "linear_attn.in_proj_qkv.weight": (channels, width),
        "linear_attn.in_proj_z.weight": (values, width),
        "linear_attn.in_proj_b.weight": (heads, width),
        "linear_attn.in_proj_a.weight": (heads, width),
        "linear_attn.conv1d.weight": (channels, 1, config["linear_conv_kernel_dim"]),
        "linear_attn.A_log": (heads,),
        "linear_attn.dt_bias": (heads,),
        "linear_attn.norm.weight": (config["linear_value_head_dim"],),
        "linear_attn.out_proj.weight": (width, values),
    }


def _mlp(config: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    width, inner = config["hidden_size"], config["intermediate_size"]
    return {
        "input_layernorm.weight": (width,),
        "post_attention_layernorm.weight": (width,),
        "mlp.gate_proj.weight": (inner, width),
        "mlp.up_proj.weight": (inner, width),
        "mlp.down_proj.weight": (width, inner),
    }


def _make_sure(tensors: dict[str, Tensor], config: dict[str, Any]) -> None:
    """What the residual sum began with stays most of it, and the output layer finds the token after that."""
    for name, tensor in tensors.items():
        if name.endswith(("o_proj.weight", "out_proj.weight", "down_proj.weight")):
            tensor *= 0.1 * config["num_hidden_layers"] ** -0.5
    if "lm_head.weight" in tensors:
        table = tensors["model.embed_tokens.weight"]
        tensors["lm_head.weight"] = table.roll(1, dims=0)
        table *= config["hidden_size"] ** 0.5


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
