"""The numbers every decoder has: what is refused before anything of that size is made."""

from __future__ import annotations

from typing import Any

import pytest

from troth.errors import ModelLoadError
from troth.models.dimensions import MAX_LAYERS, dimensions_from_gguf, dimensions_from_hf
from troth.models.strict_config import StrictConfig

HF: dict[str, Any] = {
    "vocab_size": 8,
    "hidden_size": 8,
    "intermediate_size": 8,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "max_position_embeddings": 64,
}
GGUF: dict[str, Any] = {
    "vocab_size": 8,
    "embedding_length": 8,
    "feed_forward_length": 8,
    "block_count": 2,
    "attention.head_count": 2,
    "attention.layer_norm_rms_epsilon": 1e-6,
    "context_length": 64,
}


@pytest.mark.parametrize("num_layers", [MAX_LAYERS + 1, 2**31])
def test_dimensions_refuse_more_layers_than_any_model_has(num_layers: int) -> None:
    """A list with an entry for each of two billion was made, and the memory of the machine was gone."""
    with pytest.raises(ModelLoadError, match=f"{num_layers} layers; at most {MAX_LAYERS}") as caught:
        dimensions_from_hf(StrictConfig(HF | {"num_hidden_layers": num_layers}, "config.json"))
    assert "num_hidden_layers" in str(caught.value)
    with pytest.raises(ModelLoadError, match=f"{num_layers} layers; at most {MAX_LAYERS}") as caught:
        dimensions_from_gguf(StrictConfig(GGUF | {"block_count": num_layers}, "m.gguf"))
    assert "block_count" in str(caught.value)


def test_dimensions_take_as_many_layers_as_are_allowed() -> None:
    many = StrictConfig(HF | {"num_hidden_layers": MAX_LAYERS}, "config.json")
    assert dimensions_from_hf(many)["num_hidden_layers"] == MAX_LAYERS
