"""Linear attention by the gated delta rule: one state per row instead of keys and values.

Refuses to know names of tensors: ``models/hybrid_decoder.py`` builds it. Read next: ``ops/gated_delta.py``.
Legend: T tokens, D model width, G key heads and H value heads of sizes K and E, C = 2 G K + H E, W = C + H E + 2 H.
Reference: Yang, Kautz, Hatamizadeh 2024 (Gated DeltaNet).
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from troth.cache.storage import CacheStorage
from troth.nn.batch import Batch
from troth.nn.linear import Linear
from troth.ops.gated_delta import Decay, gated_delta, trail_size
from troth.ops.gated_rms_norm import gated_rms_norm
from troth.ops.short_conv import short_conv


@dataclass(frozen=True, slots=True, kw_only=True)
class DeltaConfig:
    """The numbers that define a gated delta layer."""

    num_key_heads: int
    num_value_heads: int
    key_dim: int
    """Of one head."""
    value_dim: int
    """Of one head."""
    num_taps: int
    """Of the convolution before the recurrence."""

    @property
    def conv_width(self) -> int:
        """Channels of the convolution: all queries, keys and values."""
        return 2 * self.num_key_heads * self.key_dim + self.num_value_heads * self.value_dim

    @property
    def trail_width(self) -> int:
        """Numbers that the recurrence keeps of a draft."""
        return trail_size(self.num_key_heads, self.num_value_heads, self.key_dim, self.value_dim)


@dataclass(slots=True)
class DeltaNet:
    """Linear attention by the gated delta rule, behind a short convolution."""

    layer: int
    config: DeltaConfig
    projections: Linear
    """D -> W: queries, keys and values, then the output gate, then what becomes beta and the decay."""
    out: Linear
    conv_KC: Tensor
    decay: Decay
    norm_E: Tensor
    eps: float

    def __call__(self, x_TD: Tensor, batch: Batch, cache: CacheStorage) -> Tensor:
        """As nn.decoder.Attention."""
        heads, value_dim = self.config.num_value_heads, self.config.value_dim
        conv_state, delta_state = cache.states[self.layer]
        conv_trail, delta_trail = cache.trails[self.layer]
        sizes = [self.config.conv_width, heads * value_dim, heads, heads]
        qkv_TC, gate_TF, beta_TH, decay_TH = self.projections(x_TD, batch.rows).split(sizes, dim=-1)
        qkv_TC = short_conv(qkv_TC, self.conv_KC, conv_state, conv_trail, batch.rows)
        out_THE = gated_delta(
            qkv_TC, self.config.num_key_heads, beta_TH, decay_TH, self.decay, delta_state, delta_trail, batch.rows
        )
        out_THE = gated_rms_norm(out_THE, gate_TF.unflatten(-1, (heads, value_dim)), self.norm_E, self.eps)
        return self.out(out_THE.flatten(1), batch.rows)
