"""Checks of single request values, with errors that name the field. Knows no field itself.

Read next: ``sampling.py`` and ``request.py``, which check themselves with these.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Final

from troth.errors import RequestError

INT64: Final = 2**63 - 1
_SHOWN: Final = 80


def require_number(name: str, value: object, low: float, high: float) -> None:
    """Raise RequestError unless ``value`` is an int or float and low <= value <= high; NaN is neither."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise mistyped(name, "a number", value)
    if not low <= value <= high:
        raise RequestError(f"{name} must be between {low:g} and {high:g}, not {shown(value)}", param=name)


def require_integer(name: str, value: object, low: int, high: int) -> None:
    """Raise RequestError unless ``value`` is an int and low <= value <= high."""
    if isinstance(value, bool) or not isinstance(value, int):
        raise mistyped(name, "an integer", value)
    if not low <= value <= high:
        raise RequestError(f"{name} must be between {low} and {high}, not {shown(value)}", param=name)


def require_flag(name: str, value: object) -> None:
    """Raise RequestError unless ``value`` is True or False."""
    if not isinstance(value, bool):
        raise mistyped(name, "True or False", value)


def mistyped(name: str, wanted: str, value: object) -> RequestError:
    """The error of a value of the wrong type."""
    return _mistyped(name, wanted, shown(value))


def mistyped_json(name: str, wanted: str, value: object) -> RequestError:
    """The same of a value that callers write as JSON, in whatever language they do."""
    return _mistyped(name, wanted, shown_json(value))


def shown(value: object) -> str:
    """A value for an error message, cut short; of one that holds others only its type."""
    if isinstance(value, int) and abs(value) > 2**64:
        return f"a number of {value.bit_length()} bits"  # Python refuses to write the digits of a huge one
    if isinstance(value, (str, bytes)):
        text = repr(value[:_SHOWN])
    elif value is None or isinstance(value, (bool, int, float)):
        text = repr(value)
    else:
        text = f"a {type(value).__name__}"
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}..."


def shown_json(value: object) -> str:
    """The same of a value that callers write as JSON: ``null`` and not ``None``, an object and not a dict."""
    if isinstance(value, str):
        text = json.dumps(value[:_SHOWN], ensure_ascii=False)
        return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}..."
    if value is None or isinstance(value, bool):
        return json.dumps(value)
    if isinstance(value, Mapping):
        return "an object"
    return "an array" if isinstance(value, list | tuple) else shown(value)


def _mistyped(name: str, wanted: str, said: str) -> RequestError:
    return RequestError(f"{name} must be {wanted}, not {said}", param=name, code="invalid_type")
