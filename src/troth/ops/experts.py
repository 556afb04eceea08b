"""Sparse feed-forward layers: each token goes through the few experts that its router prefers, and a shared one.

Legend: T tokens, D model width, I inner width of an expert, E experts, F = E + 1, K experts of one token, P tokens of
one expert.

Which experts a token takes follows from its own scores alone, whatever else is in the batch. As with ``linear.py``,
``pack_experts`` has the active providers turn the artifact's weights into their form, once, at load.
References: Shazeer et al. 2017; Dai et al. 2024 (DeepSeekMoE) for the shared expert; names as in transformers'
Qwen3NextSparseMoeBlock.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any, Final, Protocol

import torch
from torch import Tensor

from troth.ops.gated_activation import gated_activation
from troth.ops.grid import Case, Inputs, sizes
from troth.ops.linear import RawLinearWeight, linear, random_weight
from troth.ops.registry import Tolerance, op


@dataclass(frozen=True, slots=True)
class Routing:
    """How a layer chooses among its experts."""

    num_chosen: int
    """K."""
    renormalises: bool
    """Whether the shares of those chosen sum to 1; otherwise they are what they are among all."""

    def choose(self, scores_TE: Tensor) -> tuple[Tensor, Tensor]:
        """The experts of each token, int64 [T, K], likeliest first, and their shares, float32 [T, K]."""
        share_TK, chosen_TK = scores_TE.float().softmax(dim=-1).topk(self.num_chosen, dim=-1)
        return chosen_TK, share_TK / share_TK.sum(dim=-1, keepdim=True) if self.renormalises else share_TK


class ExpertWeights(Protocol):
    """The experts of a layer in the form one provider computes with."""

    @property
    def shape(self) -> tuple[int, int, int]:
        """(E, D, I)."""

    @property
    def num_bytes(self) -> int:
        """Bytes they occupy in memory."""


@dataclass(frozen=True, slots=True)
class RawExperts:
    """Experts as the artifact holds them, one after the other."""

    gate_up: tuple[RawLinearWeight, ...]
    """(2 I, D) each: gate rows, then up rows."""
    down: tuple[RawLinearWeight, ...]
    """(D, I) each."""

    @property
    def shape(self) -> tuple[int, int, int]:
        """(E, D, I)."""
        return len(self.down), *self.down[0].shape

    @property
    def num_bytes(self) -> int:
        """Bytes on disk, and in memory as far as they were read."""
        return sum(weight.num_bytes for weight in (*self.gate_up, *self.down))


Packer = Callable[[RawExperts, torch.dtype, torch.device], ExpertWeights | None]
PACKERS: Final[dict[str, Packer]] = {}
"""Provider name -> packer; None from a packer means: not these experts."""

_SHAPES: Final = {"F32": (5, 32, 64, 2), "BF16": (4, 40, 24, 3), "Q8_0": (3, 64, 32, 1)}
"""Form of the weights -> experts, width, inner width, experts of a token. The second is too narrow for some kernels."""
_TIMED_SHAPE: Final = (16, 1024, 512, 4)
"""Experts of real sizes, a few of them: making hundreds takes longer than timing them."""


def _grid() -> Iterator[Case]:
    for form, shape in _SHAPES.items():
        for num_tokens, renormalises in ((1, True), (2, False), (19, True)):
            name = f"{form}-{sizes(*shape)}-{num_tokens}" + ("" if renormalises else "-shares-of-all")
            yield Case(name, partial(_arguments, form, shape, num_tokens, renormalises))
    for num_tokens in (1, 8, 256):
        name = f"BF16-{sizes(*_TIMED_SHAPE)}-{num_tokens}"
        yield Case(name, partial(_arguments, "BF16", _TIMED_SHAPE, num_tokens, True), timed=True)


@op(
    tolerances={
        torch.float32: Tolerance(1e-4, 1e-4, "two products, one behind the other, in another order"),
        torch.bfloat16: Tolerance(3e-2, 2e-2, "weights, the values between the products and the output in 8 bits"),
        torch.float16: Tolerance(4e-3, 4e-3, "weights, the values between the products and the output in 11 bits"),
    },
    grid=_grid,
)
def experts(
    x_TD: Tensor,
    scores_TF: Tensor,
    shared_TD: Tensor,
    weights: Any,
    routing: Routing,
    num_exact: int | None = None,
) -> Tensor:
    """sigmoid(gate) * shared + the sum over the token's experts of share * down(silu(gate x) * up x).

    Args:
        x_TD: float [T, D].
        scores_TF: float [T, E + 1]: the router's score of each expert, then the shared expert's gate.
        shared_TD: float [T, D], what the shared expert makes of x.
        weights: an ExpertWeights of E experts. The reference knows RawExperts.
        routing: how the scores choose.
        num_exact: as of ``linear``: tokens at the head that take the exact way; None: all of them.

    Returns:
        float [T, D], dtype of x; accumulated in float32, rounded once.
    """
    chosen_TK, share_TK = routing.choose(scores_TF[:, :-1])
    y_TD = scores_TF[:, -1:].float().sigmoid() * shared_TD.float()
    for expert in range(weights.shape[0]):
        token_P, place_P = (chosen_TK == expert).nonzero(as_tuple=True)
        gate_up_P2I = linear.reference(x_TD[token_P].float(), weights.gate_up[expert])
        y_PD = linear.reference(gated_activation.reference(gate_up_P2I, "silu"), weights.down[expert])
        y_TD.index_add_(0, token_P, y_PD * share_TK[token_P, place_P, None])
    return y_TD.to(x_TD.dtype)


def pack_experts(raw: RawExperts, dtype: torch.dtype, device: torch.device) -> ExpertWeights:
    """Hand experts to the first active provider that wants them.

    Args:
        raw: the experts of one layer.
        dtype: of the activations they will meet.
        device: where they will be used.
    """
    for provider in experts.active:
        packed = PACKERS[provider](raw, dtype, device) if provider in PACKERS else None
        if packed is not None:
            return packed
    return raw


def _arguments(
    form: str, shape: tuple[int, int, int, int], num_tokens: int, renormalises: bool, inputs: Inputs
) -> tuple[Any, ...]:
    num_experts, width, inner, num_chosen = shape

    def weights(rows: int, columns: int) -> tuple[RawLinearWeight, ...]:
        return tuple(RawLinearWeight((random_weight(inputs, form, (rows, columns)),)) for _ in range(num_experts))

    raw = RawExperts(gate_up=weights(2 * inner, width), down=weights(width, inner))
    # Far enough apart that no rounding of activations makes another choice.
    scores = [inputs.order(num_experts) for _ in range(num_tokens)]
    scores_TE = torch.tensor(scores).to(inputs.device) * (4 / num_experts)
    scores_TF = torch.cat((scores_TE, inputs.uniform(-2, 2, num_tokens, 1)), dim=1).to(inputs.dtype)
    x_TD, shared_TD = (inputs.normal(num_tokens, width) for _ in range(2))
    return x_TD, scores_TF, shared_TD, raw, Routing(num_chosen, renormalises)
