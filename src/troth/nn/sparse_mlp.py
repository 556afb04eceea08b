"""A feed-forward layer of many experts, of which each token takes a few, and one that every token takes.

Refuses to know names of tensors: ``models/expert_layers.py`` builds it. Read next: ``ops/experts.py``.
Legend: T tokens, D model width, E experts, F = E + 1.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from troth.nn.mlp import GatedMLP
from troth.ops.experts import ExpertWeights, Routing, experts
from troth.ops.linear import LinearWeight, linear
from troth.ops.rows import Rows


@dataclass(slots=True)
class SparseMLP:
    """The chosen experts' outputs by their shares, and the shared expert's by its gate."""

    scores: LinearWeight
    """D -> F: the router's score of each expert, then the shared expert's gate."""
    experts: ExpertWeights
    shared: GatedMLP
    routing: Routing

    def __call__(self, x_TD: Tensor, rows: Rows) -> Tensor:
        """As FeedForward."""
        # Exact for every token: a rounded score may choose another expert.
        scores_TF = linear(x_TD, self.scores)
        return experts(x_TD, scores_TF, self.shared(x_TD, rows), self.experts, self.routing, rows.num_exact)
