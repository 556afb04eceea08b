"""The tensors under one prefix of an artifact as parts ready to compute: packed, placed, in the right dtype.

Refuses to know any architecture: names and shapes are arguments. Tensors come from ``weights/source.py``, packing is
``ops/linear.py``'s.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from troth.nn.linear import Linear, stacked
from troth.nn.mlp import GatedMLP
from troth.ops.gated_activation import Activation
from troth.ops.linear import LinearWeight, RawWeight, pack
from troth.weights.quantized import QuantTensor
from troth.weights.source import WeightSource


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerSource:
    """Hands out parts by the names their tensors have below ``prefix``.

    Raises:
        ModelLoadError: from every method: a tensor is missing or has another shape.
    """

    source: WeightSource
    prefix: str
    dtype: torch.dtype
    """Of activations, biases and weights that are not quantised."""
    device: torch.device

    def below(self, prefix: str) -> LayerSource:
        """The same source, further down."""
        return replace(self, prefix=self.prefix + prefix)

    def has(self, name: str) -> bool:
        """Whether there is a tensor of this whole name below the prefix. Does not count as use."""
        return self.source.has(f"{self.prefix}{name}")

    def linear(self, outputs: Mapping[str, int], inputs: int, *, bias: bool = False) -> Linear:
        """One layer for projections of the same input: name without ``.weight`` -> number of outputs, side by side."""
        weights = [
            self.source.linear(f"{self.prefix}{name}.weight", shape=(rows, inputs)) for name, rows in outputs.items()
        ]
        biases = (
            [self.source.tensor(f"{self.prefix}{name}.bias", shape=(rows,)) for name, rows in outputs.items()]
            if bias
            else None
        )
        return stacked(weights, biases, self.dtype, self.device)

    def tensor(self, name: str, shape: tuple[int, ...]) -> Tensor:
        """A tensor by its whole name below the prefix, float32 on the device."""
        return self.source.tensor(f"{self.prefix}{name}", shape=shape).to(device=self.device, dtype=torch.float32)

    def stored(self, name: str, shape: tuple[int, ...]) -> Tensor:
        """The same in its stored dtype, for a weight that is packed in parts; float32 where it is stored quantised."""
        return self.source.tensor(f"{self.prefix}{name}", shape=shape)

    def norm(self, name: str, width: int, *, zero_centred: bool = False) -> Tensor:
        """The multiplier of a norm, float32 [width]; ``zero_centred`` families get 1 + weight."""
        scale = self.source.norm(f"{self.prefix}{name}.weight", zero_centred=zero_centred, shape=(width,))
        return scale.to(self.device)

    def gated_mlp(self, width: int, inner: int, *, activation: Activation = "silu", bias: bool = False) -> GatedMLP:
        """``gate_proj``, ``up_proj`` and ``down_proj`` as one feed-forward layer."""
        return GatedMLP(
            gate_up=self.linear({"gate_proj": inner, "up_proj": inner}, width, bias=bias),
            down=self.linear({"down_proj": width}, inner, bias=bias),
            activation=activation,
        )

    def vocabulary(self, head: str, shape: tuple[int, int], *, tied: bool) -> tuple[LinearWeight, LinearWeight]:
        """The embedding table ``embed_tokens`` below the prefix, and the output layer ``head``, named in full.

        ``tied`` makes them one weight, unless the artifact holds an output layer of its own that differs: some
        checkpoints store the table twice, and GGUF files say by its presence alone that there is one.
        """
        table = self.source.linear(f"{self.prefix}embed_tokens.weight", shape=shape)
        embedding = pack([table], self.dtype, self.device)
        if tied and not self.source.has(f"{head}.weight"):
            return embedding, embedding
        output = self.source.linear(f"{head}.weight", shape=shape)
        if tied and _same(table, output):
            return embedding, embedding
        return embedding, pack([output], self.dtype, self.device)


def _same(a: RawWeight, b: RawWeight) -> bool:
    if isinstance(a, QuantTensor):
        return isinstance(b, QuantTensor) and a.ggml_type == b.ggml_type and torch.equal(a.raw, b.raw)
    return isinstance(a, Tensor) and isinstance(b, Tensor) and a.dtype == b.dtype and torch.equal(a, b)
