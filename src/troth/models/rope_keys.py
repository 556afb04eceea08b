"""Where configs and GGUF headers say how heads rotate, in their old and new spellings.

Owns the keys; what they mean is ``nn/rope.py``'s. Sources: Hugging Face config.json (``rope_parameters`` since
transformers 5, before it ``rope_theta`` and ``rope_scaling``) and the ``rope.*`` keys of GGUF headers.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from troth.models.dimensions import Dimensions
from troth.models.strict_config import StrictConfig
from troth.nn.rope import RopeConfig, rope_config


def rope_from_hf(
    config: StrictConfig, size: Dimensions, *, theta: float = 10000.0, fraction: float | None = None
) -> RopeConfig:
    """Read the rotation of a config whose layers all rotate alike.

    Args:
        config: the keys are read from it and count as known.
        size: the model's head size and context; the context stands for the original one where a scaling needs that
            and the config is silent.
        theta: the family's default.
        fraction: the family's default share of a head that rotates; None: its heads rotate whole.

    Raises:
        ModelLoadError: the two spellings disagree, a scaling is unknown, or a value is of the wrong kind.
    """
    newer, older = config.mapping("rope_parameters"), config.mapping("rope_scaling")
    if newer and older and dict(newer) != dict(older):
        raise config.error("rope_parameters", f"says {newer!r}, but rope_scaling says {older!r}")
    values: dict[str, Any] = dict(newer or older or {})
    theta = config.number("rope_theta", theta)
    rotary_dim = size["head_dim"]
    if fraction is not None:
        outer, inner = config.number("partial_rotary_factor", fraction), values.pop("partial_rotary_factor", None)
        share = outer if inner is None else inner
        if not isinstance(share, int | float) or not 0 < share <= 1:
            raise config.error("partial_rotary_factor", f"must be above 0 and at most 1, not {share!r}")
        rotary_dim = int(rotary_dim * share)
    return rope_from_values(
        config, values, rotary_dim=rotary_dim, default_theta=theta, context_tokens=size["max_position_embeddings"]
    )


def rope_from_values(
    config: StrictConfig, values: Mapping[str, Any], *, rotary_dim: int, default_theta: float, context_tokens: int
) -> RopeConfig:
    """As ``nn.rope.rope_config``, for values that come from ``config``.

    Raises:
        ModelLoadError: the values give no rotation; it names the config.
    """
    try:
        return rope_config(values, rotary_dim=rotary_dim, default_theta=default_theta, context_tokens=context_tokens)
    except ValueError as error:
        raise config.error("rope_parameters", str(error)) from None


def rope_from_gguf(config: StrictConfig, size: Dimensions, *, theta: float = 10000.0) -> RopeConfig:
    """Read the ``rope.*`` keys of a GGUF header; arguments and errors as ``rope_from_hf``."""
    config.optional("rope.scaling.finetuned")  # how the model was trained; no forward pass reads it
    scaling = config.one_of("rope.scaling.type", ("none", "linear", "yarn"), "none")
    values: dict[str, Any] = {"rope_type": "default" if scaling == "none" else scaling}
    if scaling != "none":
        values["factor"] = config.number("rope.scaling.factor")
    original = config.optional("rope.scaling.original_context_length")
    if scaling == "yarn":
        values["original_max_position_embeddings"] = original
        values["beta_fast"] = config.optional("rope.scaling.yarn_beta_fast")
        values["beta_slow"] = config.optional("rope.scaling.yarn_beta_slow")
    return rope_from_values(
        config,
        values,
        rotary_dim=config.integer("rope.dimension_count", size["head_dim"]),
        default_theta=config.number("rope.freq_base", theta),
        context_tokens=size["max_position_embeddings"],
    )
