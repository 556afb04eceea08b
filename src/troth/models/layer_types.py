"""Which layers of a config attend in which way: the key ``layer_types``, or the family's older rule.

Owns the key and its checks; what a type means is the family's.
"""

from __future__ import annotations

from collections.abc import Sequence

from troth.models.strict_config import StrictConfig


def layer_types(config: StrictConfig, older_rule: Sequence[str], allowed: Sequence[str]) -> tuple[str, ...]:
    """The type of each layer.

    Args:
        config: ``layer_types`` is read from it and counts as known.
        older_rule: what the family's older keys make of each layer, in force when there is no list.
        allowed: types the family computes under this config.

    Raises:
        ModelLoadError: the list has another length than the model, or names another type.
    """
    types = config.strings("layer_types") or list(older_rule)
    if len(types) != len(older_rule):
        raise config.error("layer_types", f"lists {len(types)} layers, but the model has {len(older_rule)}")
    for kind in types:
        if kind not in allowed:
            known = ", ".join(allowed)
            raise config.error("layer_types", f"{kind!r} is not possible here; possible: {known}")
    return tuple(types)


def sliding_windows(config: StrictConfig, types: Sequence[str]) -> tuple[int | None, ...]:
    """The window of each layer: ``sliding_window`` for sliding_attention, None (all is seen) for other types.

    Raises:
        ModelLoadError: layers slide, but there is no window.
    """
    config.optional("sliding_window")
    window = config.integer("sliding_window") if "sliding_attention" in types else None
    return tuple(window if kind == "sliding_attention" else None for kind in types)
