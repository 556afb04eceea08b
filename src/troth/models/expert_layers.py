"""Experts in configs and checkpoints of Qwen's families: the keys that size them, and their tensors by name.

Checkpoints hold each expert's three matrices under its number, or those of all experts in two tensors (transformers'
own form since its release 5). Refuses to know which layers have experts: the families do. Next: ``nn/sparse_mlp.py``.
Legend: E experts, D model width, I inner width of an expert.
"""

from __future__ import annotations

from dataclasses import dataclass

from troth.models.strict_config import StrictConfig
from troth.nn.layer_source import LayerSource
from troth.nn.sparse_mlp import SparseMLP
from troth.ops.experts import RawExperts, Routing, pack_experts
from troth.ops.linear import RawLinearWeight, pack


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertsConfig:
    """The numbers that define a layer of experts."""

    num_experts: int
    routing: Routing
    intermediate_size: int
    """Of one expert."""
    shared_intermediate_size: int
    """Of the expert that every token takes."""

    def inner_size(self, width: int) -> int:
        """Values that one token has inside a layer: each expert works on a copy of it."""
        return self.routing.num_chosen * (width + self.intermediate_size) + self.shared_intermediate_size


def experts_from_hf(
    config: StrictConfig, *, num_experts: int, num_chosen: int, renormalises: bool | None = None
) -> ExpertsConfig:
    """Read the keys of a config.json.

    Args:
        config: the keys are read from it and count as known.
        num_experts, num_chosen: the family's defaults.
        renormalises: whether shares sum to 1 where the family does not leave that to ``norm_topk_prob``.

    Raises:
        ModelLoadError: a value is of the wrong kind, or a token would take more experts than there are.
    """
    # What a router's balance costs in training; no forward pass reads it.
    for inert in ("router_aux_loss_coef", "output_router_logits"):
        config.optional(inert)
    num_experts = config.integer("num_experts", num_experts)
    num_chosen = config.integer("num_experts_per_tok", num_chosen)
    if num_chosen > num_experts:
        raise config.error("num_experts_per_tok", f"a token cannot take {num_chosen} of {num_experts} experts")
    if renormalises is None:
        renormalises = config.flag("norm_topk_prob", True)
    else:
        config.one_of("norm_topk_prob", (renormalises,), renormalises)
    return ExpertsConfig(
        num_experts=num_experts,
        routing=Routing(num_chosen, renormalises),
        intermediate_size=config.integer("moe_intermediate_size", 512),
        shared_intermediate_size=config.integer("shared_expert_intermediate_size", 512),
    )


def sparse_mlp(parts: LayerSource, width: int, config: ExpertsConfig) -> SparseMLP:
    """The experts below ``parts``, for a model of that width. Raises ModelLoadError."""
    scores = [
        parts.stored("gate.weight", (config.num_experts, width)),
        parts.stored("shared_expert_gate.weight", (1, width)),
    ]
    return SparseMLP(
        scores=pack(scores, parts.dtype, parts.device),
        experts=pack_experts(_raw_experts(parts.below("experts."), width, config), parts.dtype, parts.device),
        shared=parts.below("shared_expert.").gated_mlp(width, config.shared_intermediate_size),
        routing=config.routing,
    )


def _raw_experts(parts: LayerSource, width: int, config: ExpertsConfig) -> RawExperts:
    count, inner = config.num_experts, config.intermediate_size
    if parts.has("gate_up_proj"):
        gate_up_EJD = parts.stored("gate_up_proj", (count, 2 * inner, width))
        down_EDI = parts.stored("down_proj", (count, width, inner))
        return RawExperts(
            gate_up=tuple(RawLinearWeight((one,)) for one in gate_up_EJD),
            down=tuple(RawLinearWeight((one,)) for one in down_EDI),
        )
    ups = [
        tuple(parts.stored(f"{expert}.{name}.weight", (inner, width)) for name in ("gate_proj", "up_proj"))
        for expert in range(count)
    ]
    downs = [parts.stored(f"{expert}.down_proj.weight", (width, inner)) for expert in range(count)]
    return RawExperts(
        gate_up=tuple(RawLinearWeight(both) for both in ups), down=tuple(RawLinearWeight((one,)) for one in downs)
    )
