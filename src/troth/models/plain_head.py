"""What the draft heads of Qwen's hybrids compute, in plain PyTorch: whole sequences, float32, no cache, no op.

Certificates rest on it: what the engine drafts from paged, shared and restored caches is compared with this. Refuses
to be fast. Next: ``nn/draft_head.py``, which it must agree with, and ``run/certification.py``.
Legend: T pairs, H query heads, K key-value heads, D width (of a head in HTD), V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from troth.models.hybrid_config import HybridConfig
from troth.nn.rope import rotary_table
from troth.weights.source import WeightSource

_CPU = torch.device("cpu")


class PlainHead:
    """The head of one checkpoint, on the CPU.

    Args:
        config: of a model with a draft head.
        source: its tensors; stay mapped.
        context_tokens: of the longest sequence.

    Raises:
        ModelLoadError: a tensor is missing.
    """

    def __init__(self, config: HybridConfig, source: WeightSource, context_tokens: int) -> None:
        self._config = config
        self._source = source
        prefix = "model." if source.has("model.embed_tokens.weight") else "model.language_model."
        self._table_VD = source.tensor(f"{prefix}embed_tokens.weight").float()
        self._output_VD = source.tensor("lm_head.weight").float() if source.has("lm_head.weight") else self._table_VD
        self._rotary = rotary_table(config.rope, context_tokens, _CPU)

    @torch.inference_mode()
    def drafts(self, token_ids: Sequence[int], hidden_TD: Tensor, num_drafts: int) -> list[Tensor]:
        """Logits of each draft behind known tokens, float32 [V]; each is drafted behind the likeliest before it.

        Args:
            token_ids: the known tokens, at least two.
            hidden_TD: the model's final hidden states of them, the last aside.
            num_drafts: how many.
        """
        tokens, found, hidden_TD = list(token_ids), list[Tensor](), hidden_TD.float().cpu()
        for _ in range(num_drafts):
            last_D = self._last(tokens[1:], hidden_TD)
            logits_V = self._output_VD @ last_D
            found.append(logits_V)
            hidden_TD = torch.cat((hidden_TD, last_D[None]))
            tokens.append(int(logits_V.argmax()))
        return found

    def _last(self, tokens: Sequence[int], hidden_TD: Tensor) -> Tensor:
        """Of pairs (token, hidden state of the one before it), the head's output at the last, [D]."""
        token_TD = self._norm(self._table_VD[torch.tensor(tokens)], "pre_fc_norm_embedding")
        joined_TD = torch.cat((token_TD, self._norm(hidden_TD, "pre_fc_norm_hidden")), dim=-1)
        x_TD = self._linear(joined_TD, "fc")
        x_TD = x_TD + self._attention(self._norm(x_TD, "layers.0.input_layernorm"))
        y_TD = self._norm(x_TD, "layers.0.post_attention_layernorm")
        y_TD = self._gated_mlp(y_TD, "layers.0.mlp.") if self._config.experts is None else self._experts(y_TD)
        return self._norm(x_TD + y_TD, "norm")[-1]

    def _gated_mlp(self, x_TD: Tensor, at: str) -> Tensor:
        gate_TI = F.silu(self._linear(x_TD, f"{at}gate_proj"))
        return self._linear(gate_TI * self._linear(x_TD, f"{at}up_proj"), f"{at}down_proj")

    def _experts(self, x_TD: Tensor) -> Tensor:
        config, at = self._config.experts, "layers.0.mlp."
        assert config is not None, self._config
        share_TE = self._linear(x_TD, f"{at}gate").softmax(dim=-1)
        least_T1 = share_TE.topk(config.routing.num_chosen).values[:, -1:]
        share_TE = share_TE.where(share_TE >= least_T1, 0.0)
        if config.routing.renormalises:
            share_TE = share_TE / share_TE.sum(dim=-1, keepdim=True)
        y_TD = self._linear(x_TD, f"{at}shared_expert_gate").sigmoid() * self._gated_mlp(x_TD, f"{at}shared_expert.")
        for expert in range(config.num_experts):
            y_TD = y_TD + share_TE[:, expert, None] * self._expert(x_TD, expert, f"{at}experts.")
        return y_TD

    def _expert(self, x_TD: Tensor, expert: int, at: str) -> Tensor:
        if not self._source.has(f"mtp.{at}gate_up_proj"):
            return self._gated_mlp(x_TD, f"{at}{expert}.")
        gate_up, down = (self._source.tensor(f"mtp.{at}{name}")[expert] for name in ("gate_up_proj", "down_proj"))
        gate_TI, up_TI = (x_TD @ gate_up.float().T).chunk(2, dim=-1)
        return (F.silu(gate_TI) * up_TI) @ down.float().T

    def _attention(self, x_TD: Tensor) -> Tensor:
        config, at = self._config, "layers.0.self_attn."
        size = config.head_dim
        # q_proj holds the rows of each head's query, then those of its gate, head by head.
        both = self._linear(x_TD, f"{at}q_proj").unflatten(-1, (config.num_attention_heads, 2, size))
        q_HTD = self._turned(self._norm(both[:, :, 0], f"{at}q_norm").transpose(0, 1))
        k_TKD, v_TKD = (
            self._linear(x_TD, f"{at}{name}").unflatten(-1, (config.num_key_value_heads, size))
            for name in ("k_proj", "v_proj")
        )
        k_KTD = self._turned(self._norm(k_TKD, f"{at}k_norm").transpose(0, 1))
        shared = config.num_attention_heads // config.num_key_value_heads
        k_HTD, v_HTD = (x.repeat_interleave(shared, dim=0) for x in (k_KTD, v_TKD.transpose(0, 1)))
        scores_HTT = q_HTD @ k_HTD.transpose(1, 2) * size**-0.5
        later_TT = torch.ones(scores_HTT.shape[1:], dtype=torch.bool).triu(1)
        out_HTD = scores_HTT.masked_fill(later_TT, float("-inf")).softmax(dim=-1) @ v_HTD
        return self._linear(out_HTD.transpose(0, 1).flatten(1) * both[:, :, 1].flatten(1).sigmoid(), f"{at}o_proj")

    def _turned(self, x_HTD: Tensor) -> Tensor:
        cos_TW, sin_TW = (table[: x_HTD.shape[1]] for table in (self._rotary.cos_PW, self._rotary.sin_PW))
        width = cos_TW.shape[1]
        a, b, rest = x_HTD[..., :width], x_HTD[..., width : 2 * width], x_HTD[..., 2 * width :]
        return torch.cat((a * cos_TW - b * sin_TW, b * cos_TW + a * sin_TW, rest), dim=-1)

    def _norm(self, x: Tensor, name: str) -> Tensor:
        scale_D = self._source.norm(f"mtp.{name}.weight", zero_centred=True)
        return x * (x.square().mean(-1, keepdim=True) + self._config.rms_norm_eps).rsqrt() * scale_D

    def _linear(self, x: Tensor, name: str) -> Tensor:
        y = x @ self._source.tensor(f"mtp.{name}.weight").float().T
        bias = self._source.optional_tensor(f"mtp.{name}.bias")
        return y if bias is None else y + bias.float()
