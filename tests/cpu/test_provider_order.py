"""Which op providers an engine asks for: those of its options, behind the invariant ones where it is deterministic."""

from __future__ import annotations

import pytest

from troth.config.options import EngineOptions
from troth.contracts.cache_spec import AttentionSpec, RecurrentSpec, StateTensor
from troth.errors import OptionError
from troth.ops import registry
from troth.run.assemble import provider_order

ATTENTION = AttentionSpec(layers=(1,), num_kv_heads=1, head_dim=8, value_dim=8, element_bytes=2, window=None)


def test_engine_asks_for_the_providers_of_its_options() -> None:
    assert provider_order(EngineOptions(), (ATTENTION,)) is None
    assert provider_order(EngineOptions(providers=("torch",)), (ATTENTION,)) == ("torch",)


def test_deterministic_engine_asks_for_invariant_ops_first() -> None:
    order = provider_order(EngineOptions(deterministic=True), (ATTENTION,))
    assert order == ("invariant", *registry.default_order())
    chosen = EngineOptions(deterministic=True, providers=("triton", "torch"))
    assert provider_order(chosen, (ATTENTION,)) == ("invariant", "triton", "torch")


def test_deterministic_engine_refuses_recurrent_layers_by_name() -> None:
    recurrent = RecurrentSpec(layers=(0,), tensors=(StateTensor((16,), 4),))
    with pytest.raises(OptionError, match="recurrent layers"):
        provider_order(EngineOptions(deterministic=True), (ATTENTION, recurrent))
