"""Numbers of things in messages: ``1 row``, ``8 rows``. Refuses to know what they count."""

from __future__ import annotations


def counted(number: int, one: str, many: str | None = None, *, spec: str = "") -> str:
    """A number and its noun.

    Args:
        number: how many.
        one: the noun of one.
        many: of more or none; None: with an s.
        spec: how the number is written, as in a format string.
    """
    return f"{number:{spec}} {one if number == 1 else many or f'{one}s'}"
