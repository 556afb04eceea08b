"""Bytes, counts and rates as people read them."""

from __future__ import annotations

from typing import Final

_BINARY: Final = ("B", "KiB", "MiB", "GiB", "TiB")
_DECIMAL: Final = (("T", 10**12), ("B", 10**9), ("M", 10**6), ("K", 10**3))


def bytes_text(num_bytes: int) -> str:
    """Three digits and a binary unit: ``98.1 MiB``."""
    value, unit = float(num_bytes), 0
    # 999.5 and not 1024: four digits would break the column.
    while value >= 999.5 and unit < len(_BINARY) - 1:
        value, unit = value / 1024, unit + 1
    return f"{value:.0f} {_BINARY[unit]}" if unit == 0 or value >= 99.95 else f"{value:.1f} {_BINARY[unit]}"


def count_text(number: int) -> str:
    """Three digits and the field's own letter, as parameters are told: ``135M``, ``8.03B``."""
    for letter, unit in _DECIMAL:
        if number >= 0.9995 * unit:
            return f"{number / unit:#.3g}".rstrip(".") + letter
    return str(number)


def rate_text(num_tokens: int, time_s: float) -> str:
    """Tokens per second, or a dash where no time passed."""
    return f"{num_tokens / time_s:.1f} tok/s" if time_s > 0 and num_tokens > 0 else "-"
