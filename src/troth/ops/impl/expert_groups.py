"""Experts one after the other, each over the tokens that chose it, by whatever provider holds its two products.

Needs the choices on the host: for CPUs. Registers nothing; ``cpu_experts.py`` and ``torch_experts.py`` do.
Legend: as ``ops/experts.py``; Q = T K, the pairs of a token and an expert it chose.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from troth.ops.experts import RawExperts, Routing
from troth.ops.gated_activation import gated_activation
from troth.ops.linear import LinearWeight, Packer, RawLinearWeight, linear


@dataclass(frozen=True, slots=True, eq=False)
class ExpertLinears:
    """The two products of each expert, packed each for itself."""

    gate_up: tuple[LinearWeight, ...]
    """(2 I, D) each."""
    down: tuple[LinearWeight, ...]
    """(D, I) each."""

    @property
    def shape(self) -> tuple[int, int, int]:
        """(E, D, I)."""
        return len(self.down), *self.down[0].shape

    @property
    def num_bytes(self) -> int:
        """Bytes in memory; those of plain numbers may be shared with the page cache."""
        return sum(weight.num_bytes for weight in (*self.gate_up, *self.down))


def packed_each(pack: Packer, raw: RawExperts, dtype: torch.dtype, device: torch.device) -> ExpertLinears | None:
    """Every product in the form that a provider of ``linear`` packs; None where it does not want one of them."""

    def packed(weights: tuple[RawLinearWeight, ...]) -> tuple[LinearWeight, ...]:
        forms = (pack(weight.parts, dtype, device) for weight in weights)
        return tuple(form for form in forms if form is not None)

    gate_up, down = packed(raw.gate_up), packed(raw.down)
    return ExpertLinears(gate_up, down) if len(gate_up) == len(down) == raw.shape[0] else None


def grouped_experts(
    x_TD: Tensor,
    scores_TF: Tensor,
    shared_TD: Tensor,
    weights: ExpertLinears,
    routing: Routing,
    num_exact: int | None,
) -> Tensor:
    """As ops.experts. A token's experts are added in order of their numbers, in any batch."""
    chosen_TK, share_TK = routing.choose(scores_TF[:, :-1])
    # Pairs by expert, the tokens of each in order: exact ones first, as ``linear`` wants them.
    order_Q = chosen_TK.flatten().argsort(stable=True)
    token_Q, share_Q1 = order_Q // routing.num_chosen, share_TK.flatten()[order_Q, None]
    counts, exact_counts = (
        chosen.flatten().bincount(minlength=weights.shape[0]).tolist() for chosen in (chosen_TK, chosen_TK[:num_exact])
    )
    y_TD = scores_TF[:, -1:].float().sigmoid() * shared_TD
    begin = 0
    for expert, count in enumerate(counts):
        if count:
            token_P = token_Q[begin : begin + count]
            gate_up_P2I = linear(x_TD[token_P], weights.gate_up[expert], None, exact_counts[expert])
            inner_PI = gated_activation(gate_up_P2I, "silu")
            y_PD = linear(inner_PI, weights.down[expert], None, exact_counts[expert])
            y_TD.index_add_(0, token_P, y_PD * share_Q1[begin : begin + count])
            begin += count
    return y_TD.to(x_TD.dtype)
