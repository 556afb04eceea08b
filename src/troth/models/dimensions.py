"""The numbers every decoder has, under the keys of Hugging Face configs and of GGUF headers.

Owns the common keys; each family reads its own beside them. Sources: transformers' config classes and the key names
of GGUF (``{architecture}.attention.head_count`` and so on, prefix removed).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final, TypedDict

from troth.models.strict_config import StrictConfig

MAX_LAYERS: Final = 4096
"""The deepest models have some hundred. Lists of layers are made before anyone knows how many the weights have."""
_NO_DEFAULTS: Final[Mapping[str, Any]] = {}


class Dimensions(TypedDict):
    """Handed on to a family's Config as keyword arguments."""

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    rms_norm_eps: float
    max_position_embeddings: int


def dimensions_from_hf(config: StrictConfig, defaults: Mapping[str, Any] = _NO_DEFAULTS) -> Dimensions:
    """Read the common keys of a config.json.

    Args:
        config: where to read; the keys count as known.
        defaults: the family's values for keys a config may leave out. Without one, ``num_key_value_heads`` is the
            number of query heads, ``head_dim`` the width divided among them, ``rms_norm_eps`` 1e-6.

    Raises:
        ModelLoadError: a key is missing or of the wrong kind.
    """
    heads = config.integer("num_attention_heads", defaults.get("num_attention_heads"))
    kv_heads = config.integer("num_key_value_heads", defaults.get("num_key_value_heads", heads))
    if heads % kv_heads:
        raise config.error("num_key_value_heads", f"{heads} query heads cannot share {kv_heads} of keys and values")
    hidden = config.integer("hidden_size", defaults.get("hidden_size"))
    return Dimensions(
        vocab_size=config.integer("vocab_size", defaults.get("vocab_size")),
        hidden_size=hidden,
        intermediate_size=config.integer("intermediate_size", defaults.get("intermediate_size")),
        num_hidden_layers=_num_layers(config, "num_hidden_layers", defaults.get("num_hidden_layers")),
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        head_dim=config.integer("head_dim", defaults.get("head_dim", hidden // heads)),
        rms_norm_eps=config.number("rms_norm_eps", 1e-6),
        max_position_embeddings=config.integer("max_position_embeddings", defaults.get("max_position_embeddings")),
    )


def dimensions_from_gguf(config: StrictConfig) -> Dimensions:
    """Read the common keys of a GGUF header; errors as ``dimensions_from_hf``."""
    heads = config.integer("attention.head_count")
    kv_heads = config.integer("attention.head_count_kv", heads)
    if heads % kv_heads:
        raise config.error("attention.head_count_kv", f"{heads} query heads cannot share {kv_heads} of keys and values")
    hidden = config.integer("embedding_length")
    head_dim = config.integer("attention.key_length", hidden // heads)
    config.one_of("attention.value_length", (head_dim,), head_dim)
    return Dimensions(
        vocab_size=config.integer("vocab_size"),
        hidden_size=hidden,
        intermediate_size=config.integer("feed_forward_length"),
        num_hidden_layers=_num_layers(config, "block_count"),
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        head_dim=head_dim,
        rms_norm_eps=config.number("attention.layer_norm_rms_epsilon"),
        max_position_embeddings=config.integer("context_length"),
    )


def _num_layers(config: StrictConfig, key: str, default: int | None = None) -> int:
    count = config.integer(key, default)
    if count > MAX_LAYERS:
        raise config.error(key, f"{count} layers; at most {MAX_LAYERS} are possible")
    return count
