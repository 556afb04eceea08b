"""Owns the price of what a chat template does, in steps, and the purse it is paid from.

Knows no Jinja syntax. A step is about one syntax node executed or 16 bytes touched, so one number bounds time and
memory together. Read next: ``template_sandbox.py`` (pays it), ``chat_template.py`` (fills the purse).
"""

from __future__ import annotations

import re
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence, Sized
from contextlib import contextmanager
from typing import Any, Final

from jinja2.exceptions import TemplateRuntimeError

MAX_STEPS: Final = 20_000_000
STEPS_PER_CHARACTER: Final = 100
STEPS_PER_MESSAGE: Final = 20_000
"""The budget grows with the conversation: some templates go through each character of it (75 steps), others through
all messages for each message (20 steps). A thousand turns of 500 characters cost 0.5 to 36 million steps."""

# Prices, measured so that 20 million steps take one to four seconds of one slow core whatever they are spent on.
BYTES_PER_STEP_LOG2: Final = 4
LOOK_STEPS: Final = 8
ITERATION_STEPS: Final = 10
CALL_STEPS: Final = 20
MACRO_STEPS: Final = 40
ENTRY_STEPS: Final = 4  # a list entry with a small object behind it: about 64 bytes

_MAX_INT_BITS: Final = 4096
_MAX_PADDING: Final = 9999
_WIDE_FORMAT: Final = {
    "{": re.compile(r"\{[^{}]*:[^{}]*(?:\d{5}|\{)"),
    "%": re.compile(r"%(?:\([^)]*\))?[-+ #0]*(?:\d{5}|\*|\d*\.(?:\d{5}|\*))"),
}


class TooMuchWork(TemplateRuntimeError):
    """The budget is spent, or one operation would spend it at once."""


class Budget:
    """The steps each thread's render has left."""

    def __init__(self) -> None:
        self._purse = threading.local()

    @contextmanager
    def filled(self, num_steps: int) -> Iterator[None]:
        """Let this thread spend ``num_steps``."""
        self._purse.num_steps = num_steps
        try:
            yield
        finally:
            self._purse.num_steps = 0

    def pay(self, num_steps: int) -> None:
        """Spend steps. Raises TooMuchWork when there are none left."""
        self._purse.num_steps -= num_steps
        if self._purse.num_steps < 0:
            raise TooMuchWork("the template does too much work for this conversation")

    def pay_for(self, value: object, *, deep: bool = True) -> None:
        """Spend what reading ``value`` costs; ``deep`` also what is inside it, before anyone turns it into text."""
        if type(value) is str:  # most are
            self.pay(LOOK_STEPS + (len(value) >> BYTES_PER_STEP_LOG2))
            return
        waiting = [value]
        while waiting:
            item = waiting.pop()
            if isinstance(item, str):
                self.pay(LOOK_STEPS + (len(item) >> BYTES_PER_STEP_LOG2))
            elif isinstance(item, int):
                self.pay(LOOK_STEPS + (item.bit_length() >> (BYTES_PER_STEP_LOG2 + 3)))
            elif isinstance(item, Sized):
                self.pay(LOOK_STEPS + len(item))
                if deep and isinstance(item, Mapping):
                    waiting += item
                    waiting += item.values()
                elif deep and isinstance(item, (list, tuple)):
                    waiting += item

    def pay_for_format(self, pattern: str, mark: str, values: object) -> None:
        """Spend what filling ``pattern`` may cost, each field with all of the values."""
        if _WIDE_FORMAT[mark].search(pattern):
            raise TooMuchWork(f"the template pads to more than {_MAX_PADDING} characters in {pattern[:80]!r}")
        for _ in range(pattern.count(mark)):
            self.pay_for(values)
            self.pay(_MAX_PADDING >> BYTES_PER_STEP_LOG2)

    def pay_for_growth(self, name: str, values: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        """Spend what a filter or string method may write beyond what it reads."""
        growth = _GROWTH.get(name)
        if growth is not None:
            self.pay(growth(values, kwargs) >> BYTES_PER_STEP_LOG2)

    def pay_for_operator(self, operator: str, left: Any, right: Any) -> None:
        """Spend what an arithmetic operator costs. Numbers stay below 4,096 bits."""
        if operator == "%" and isinstance(left, str):
            self.pay_for_format(left, "%", right)
        elif operator in ("*", "**") and isinstance(left, int) and isinstance(right, int):
            bits = left.bit_length()
            bits = bits + right.bit_length() if operator == "*" else bits * abs(right)
            if bits > _MAX_INT_BITS:
                raise TooMuchWork(f"the template computes a number of {bits} bits; {_MAX_INT_BITS} are allowed")
        elif operator == "*":
            for items, count in ((left, right), (right, left)):
                if isinstance(items, Sized) and isinstance(count, int):
                    length = len(items) * max(count, 0)
                    self.pay(length >> BYTES_PER_STEP_LOG2 if isinstance(items, str) else length * ENTRY_STEPS)
        self.pay_for(left, deep=False)
        self.pay_for(right, deep=False)


def _second(values: Sequence[Any], kwargs: Mapping[str, Any], name: str) -> Any:
    return values[1] if len(values) > 1 else kwargs.get(name, "")


def _padding(values: Sequence[Any], kwargs: Mapping[str, Any]) -> int:
    return sum(abs(value) for value in (*values[1:], *kwargs.values()) if isinstance(value, int))


def _entries(values: Sequence[Any], kwargs: Mapping[str, Any]) -> int:
    return _padding(values, kwargs) * ENTRY_STEPS << BYTES_PER_STEP_LOG2


def _tabs(values: Sequence[Any], kwargs: Mapping[str, Any]) -> int:
    return str(values[0]).count("\t") * (8 + _padding(values, kwargs))


def _replacing(values: Sequence[Any], kwargs: Mapping[str, Any]) -> int:
    new = values[2] if len(values) > 2 else kwargs.get("new", "")
    return str(values[0]).count(str(_second(values, kwargs, "old"))) * len(str(new))


def _joining(values: Sequence[Any], kwargs: Mapping[str, Any]) -> int:
    """``text.join(items)`` or ``items|join(text)``: one text per item, whichever of the two comes first."""
    lengths = [len(value) for value in (values[0], _second(values, kwargs, "d")) if isinstance(value, Sized)]
    return lengths[0] * lengths[1] if len(lengths) == 2 else 0


def _indenting(values: Sequence[Any], kwargs: Mapping[str, Any]) -> int:
    width = _second(values, kwargs, "width")
    return (str(values[0]).count("\n") + 1) * (4 + (abs(width) if isinstance(width, int) else len(str(width))))


def _summing(values: Sequence[Any], kwargs: Mapping[str, Any]) -> int:
    """Adding lists copies the sum so far each time."""
    start = values[2] if len(values) > 2 else kwargs.get("start", 0)
    if isinstance(start, (int, float)):
        return 0
    if _second(values, kwargs, "attribute"):
        raise TooMuchWork("the template adds up lists by attribute")
    return sum(len(item) for item in values[0] if isinstance(item, Sized)) * len(values[0]) << BYTES_PER_STEP_LOG2


_GROWTH: Final[dict[str, Callable[[Sequence[Any], Mapping[str, Any]], int]]] = {
    **dict.fromkeys(("batch", "slice"), _entries),
    **dict.fromkeys(("center", "ljust", "rjust", "truncate", "zfill"), _padding),
    "expandtabs": _tabs,
    "indent": _indenting,
    "join": _joining,
    "replace": _replacing,
    "sum": _summing,
}
"""Filters and string methods whose result may be larger than what they read: how many characters more."""
