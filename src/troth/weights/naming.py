"""Where a GGUF keeps what Hugging Face checkpoints call by another name: data, one table per architecture.

Models ask for Hugging Face names; ``gguf.py`` here turns the names of a GGUF into those. Names that no
table knows stay as they are, so that a tensor nobody expects is found unused by its own name, and
``rope_freqs.weight`` can be asked for. Source: the tensor names of llama.cpp's converters and graphs.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

_OUTER: Final = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
}
_ATTENTION: Final = {
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
}
_QK_NORM: Final = {"attn_q_norm": "self_attn.q_norm", "attn_k_norm": "self_attn.k_norm"}
_MLP: Final = {"ffn_gate": "mlp.gate_proj", "ffn_up": "mlp.up_proj", "ffn_down": "mlp.down_proj"}
_PRE_NORMS: Final = {"attn_norm": "input_layernorm", "ffn_norm": "post_attention_layernorm"}
_FOUR_NORMS: Final = {
    "attn_norm": "input_layernorm",
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
_IN_BLOCK: Final = re.compile(r"blk\.(0|[1-9][0-9]{0,5})\.(\w+(?:\.\w+)*)", re.ASCII)


@dataclass(frozen=True, slots=True, kw_only=True)
class GgufNaming:
    """How one GGUF architecture names and stores what it shares with Hugging Face checkpoints."""

    outer: Mapping[str, str]
    """Names outside the blocks, without .weight or .bias: GGUF -> Hugging Face."""
    block: Mapping[str, str]
    """Names after ``blk.N.``: GGUF -> what follows ``model.layers.N.``."""
    interleaved: Mapping[str, str]
    """Projections whose rows the converter reordered for interleaved rotary pairs -> the key of their head
    count."""

    def hugging_face(self, name: str) -> str:
        """The Hugging Face name of a GGUF tensor; the name itself when the tables do not know it."""
        stem, _, kind = name.rpartition(".")
        if stem in self.outer:
            return f"{self.outer[stem]}.{kind}"
        index, part = _block(stem)
        if part in self.block:
            return f"model.layers.{index}.{self.block[part]}.{kind}"
        return name

    def head_count_key(self, name: str) -> str | None:
        """Of a GGUF tensor with reordered rows, the metadata key that holds its number of heads."""
        return self.interleaved.get(_block(name.rpartition(".")[0])[1])


GGUF_NAMING: Final[Mapping[str, GgufNaming]] = {
    # Also Mistral, SmolLM and every other model converted as llama.
    "llama": GgufNaming(
        outer=_OUTER,
        block=_PRE_NORMS | _ATTENTION | _MLP,
        interleaved={"attn_q": "llama.attention.head_count", "attn_k": "llama.attention.head_count_kv"},
    ),
    "qwen2": GgufNaming(outer=_OUTER, block=_PRE_NORMS | _ATTENTION | _MLP, interleaved={}),
    "qwen3": GgufNaming(outer=_OUTER, block=_PRE_NORMS | _ATTENTION | _QK_NORM | _MLP, interleaved={}),
    # The norm behind the last layer is named after the embedding by both.
    "lfm2": GgufNaming(
        outer={
            "token_embd": "model.embed_tokens",
            "token_embd_norm": "model.embedding_norm",
            "output": "lm_head",
        },
        block={
            "attn_norm": "operator_norm",
            "attn_q": "self_attn.q_proj",
            "attn_k": "self_attn.k_proj",
            "attn_v": "self_attn.v_proj",
            "attn_output": "self_attn.out_proj",
            "attn_q_norm": "self_attn.q_layernorm",
            "attn_k_norm": "self_attn.k_layernorm",
            "shortconv.conv": "conv.conv",
            "shortconv.in_proj": "conv.in_proj",
            "shortconv.out_proj": "conv.out_proj",
            "ffn_norm": "ffn_norm",
            "ffn_gate": "feed_forward.w1",
            "ffn_up": "feed_forward.w3",
            "ffn_down": "feed_forward.w2",
        },
        interleaved={},
    ),
    "gemma3": GgufNaming(outer=_OUTER, block=_FOUR_NORMS | _ATTENTION | _QK_NORM | _MLP, interleaved={}),
}
"""general.architecture -> names."""


def _block(stem: str) -> tuple[str, str]:
    """``blk.7.attn_q`` -> ("7", "attn_q"); two empty strings for any other name."""
    match = _IN_BLOCK.fullmatch(stem)
    return (match[1], match[2]) if match else ("", "")
