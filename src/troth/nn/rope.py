"""Rotary position tables and their scalings (Su et al. 2021; reference formulas named at each scaling).

Refuses to know files: values that make no rotation are a ValueError, to which ``models/rope_keys.py`` adds the place.
Legend: W rotated pairs of a head, P positions.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final

import torch
from torch import Tensor

from troth.ops.rotary_kv_write import RotaryTable

SCALINGS: Final[Mapping[str, tuple[tuple[str, ...], tuple[str, ...]]]] = {
    "default": ((), ()),
    "linear": (("factor",), ()),
    "llama3": (("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"), ()),
    "yarn": (
        ("factor", "original_max_position_embeddings"),
        ("attention_factor", "beta_fast", "beta_slow", "mscale", "mscale_all_dim", "truncate"),
    ),
}
"""Name -> the keys it needs, and those it may have."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RopeConfig:
    """How one kind of layer rotates its heads.

    Raises:
        ValueError: numbers that give no rotation.
    """

    rotary_dim: int
    """Values of a head that rotate, the first ones."""
    theta: float
    scaling: str = "default"
    values: Mapping[str, float] = field(default_factory=dict)
    """The scaling's own numbers, named as in Hugging Face configs."""

    def __post_init__(self) -> None:
        if self.rotary_dim < 2 or self.rotary_dim % 2:
            raise ValueError(f"rotary size must be even and at least 2, not {self.rotary_dim}")
        if not 1 < self.theta < math.inf:
            raise ValueError(f"rope theta must be above 1, not {self.theta}")
        if self.scaling not in SCALINGS:
            raise ValueError(f"rope scaling {self.scaling!r} is not supported; supported: {', '.join(SCALINGS)}")
        for key in ("factor", "original_max_position_embeddings", "beta_fast", "beta_slow"):
            if not 0 < self.values.get(key, 1) < math.inf:
                raise ValueError(f"{key} must be positive, not {self.values[key]}")
        low, high = self.values.get("low_freq_factor", 0), self.values.get("high_freq_factor", 1)
        if not low < high:
            raise ValueError(f"high_freq_factor {high} must be above low_freq_factor {low}")


def rope_config(values: Mapping[str, Any], *, rotary_dim: int, default_theta: float, context_tokens: int) -> RopeConfig:
    """Read one object of Hugging Face's ``rope_parameters``, or an older ``rope_scaling``.

    Args:
        values: the object.
        rotary_dim: values of a head that rotate.
        default_theta: where the object does not say.
        context_tokens: stands for ``original_max_position_embeddings`` where a scaling needs it and none is given.

    Raises:
        ValueError: an unknown scaling, or a key it lacks or does not know, or whose value is no usable number.
    """
    rest = {key: value for key, value in values.items() if value is not None}
    older_name = rest.pop("type", "default")
    scaling = str(rest.pop("rope_type", older_name))
    # One position per token makes the three axes of multimodal rotation equal, whatever the sections are.
    for axis_key in ("mrope_section", "mrope_interleaved"):
        rest.pop(axis_key, None)
    for key, value in rest.items():
        if not isinstance(value, int | float) or not math.isfinite(value):
            raise ValueError(f"{key} must be a number, not {value!r}")
    theta = float(rest.pop("rope_theta", default_theta))
    if rest.pop("partial_rotary_factor", 1.0) != 1.0:
        raise ValueError("heads of this family rotate whole: partial_rotary_factor")
    required, optional = SCALINGS.get(scaling, ((), tuple(rest)))
    if "original_max_position_embeddings" in required:
        rest.setdefault("original_max_position_embeddings", context_tokens)
    for key in sorted(rest.keys() ^ set(required)):
        if key in required:
            raise ValueError(f"rope scaling {scaling!r} lacks {key!r}")
        if key not in optional:
            raise ValueError(f"rope scaling {scaling!r} does not know {key!r}")
    return RopeConfig(rotary_dim=rotary_dim, theta=theta, scaling=scaling, values=rest)


def rotary_table(config: RopeConfig, num_positions: int, device: torch.device) -> RotaryTable:
    """cos and sin of positions 0 .. num_positions - 1, computed in float64 and rounded once to float32."""
    frequency_W, attention_factor = frequencies(config)
    angle_PW = torch.arange(num_positions, dtype=torch.float64)[:, None] * frequency_W
    cos, sin = angle_PW.cos() * attention_factor, angle_PW.sin() * attention_factor
    return RotaryTable(cos.float().to(device), sin.float().to(device))


def frequencies(config: RopeConfig) -> tuple[Tensor, float]:
    """Radians per position of each pair (float64 [W]), and the factor on cos and sin."""
    exponent = torch.arange(0, config.rotary_dim, 2, dtype=torch.float64) / config.rotary_dim
    base_W = config.theta**-exponent
    if config.scaling == "linear":
        return base_W / config.values["factor"], 1.0
    if config.scaling == "llama3":
        return _llama3(base_W, config.values), 1.0
    if config.scaling == "yarn":
        return _yarn(base_W, config)
    return base_W, 1.0


def _llama3(base_W: Tensor, values: Mapping[str, float]) -> Tensor:
    """Llama 3.1: long wavelengths are slowed by ``factor``, short ones kept, those between blended."""
    original = values["original_max_position_embeddings"]
    low, high = values["low_freq_factor"], values["high_freq_factor"]
    turns_W = original * base_W / (2 * math.pi)
    kept_W = ((turns_W - low) / (high - low)).clamp(0, 1)
    return base_W * kept_W + base_W / values["factor"] * (1 - kept_W)


def _yarn(base_W: Tensor, config: RopeConfig) -> tuple[Tensor, float]:
    """YaRN (Peng et al. 2023): interpolate pairs that turn seldom, keep those that turn often."""
    values = config.values
    factor = values["factor"]
    original = values["original_max_position_embeddings"]

    def pair_with_turns(turns: float) -> float:
        return config.rotary_dim * math.log(original / (turns * 2 * math.pi)) / (2 * math.log(config.theta))

    low, high = pair_with_turns(values.get("beta_fast", 32)), pair_with_turns(values.get("beta_slow", 1))
    if values.get("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, config.rotary_dim - 1)
    index_W = torch.arange(base_W.shape[0], dtype=torch.float64)
    interpolated_W = ((index_W - low) / max(high - low, 0.001)).clamp(0, 1)
    scaled_W = base_W / factor * interpolated_W + base_W * (1 - interpolated_W)
    return scaled_W, _yarn_attention_factor(values)


def _yarn_attention_factor(values: Mapping[str, float]) -> float:
    def mscale(weight: float) -> float:
        return 0.1 * weight * math.log(values["factor"]) + 1.0 if values["factor"] > 1 else 1.0

    if values.get("attention_factor") is not None:
        return float(values["attention_factor"])
    if values.get("mscale") and values.get("mscale_all_dim"):
        return mscale(values["mscale"]) / mscale(values["mscale_all_dim"])
    return mscale(1.0)
