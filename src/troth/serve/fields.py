"""A JSON object read field by field, with errors that name the field.

Refuses to know which API it reads. An explicit null means absent; whatever nobody asked for is listed by ``unknown``.
Read next: ``sampling.py``, ``openai_chat.py``.
"""

from __future__ import annotations

import re
from typing import Any, Final

import msgspec

from troth.contracts.bounds import mistyped_json, shown_json
from troth.errors import RequestError

_LONE_SURROGATE: Final = re.compile(rb"\\u[dD][89a-fA-F]")
INT64: Final = 2**63 - 1


def decode_object(body: bytes) -> dict[str, Any]:
    """Read a request body that must be one JSON object. Raises RequestError."""
    try:
        value = msgspec.json.decode(body)
    except RecursionError:
        raise RequestError("the body is nested too deeply; flatten it", code="invalid_json") from None
    except (msgspec.DecodeError, UnicodeDecodeError, ValueError) as error:
        hint = " (an escaped surrogate without its partner?)" if _LONE_SURROGATE.search(body) else ""
        raise RequestError(f"the body is not valid JSON: {error}{hint}", code="invalid_json") from None
    if not isinstance(value, dict):
        raise RequestError(f"the body must be a JSON object, not {shown_json(value)}", code="invalid_type")
    return value


class Fields:
    """The fields of one JSON object. ``path`` precedes their names in errors."""

    def __init__(self, values: dict[str, Any], path: str = "") -> None:
        self._values = values
        self._path = path
        self._asked: set[str] = set()

    def name(self, field: str) -> str:
        """How errors call a field."""
        return f"{self._path}.{field}" if self._path else field

    def raw(self, field: str) -> Any:
        """The value as it came; None when absent."""
        self._asked.add(field)
        return self._values.get(field)

    def text(self, field: str) -> str | None:
        """A string."""
        value = self.raw(field)
        if value is None or isinstance(value, str):
            return value
        raise self._mistyped(field, "a string", value)

    def flag(self, field: str, default: bool = False) -> bool:
        """A boolean."""
        value = self.raw(field)
        if value is None:
            return default
        if isinstance(value, bool):
            return value
        raise self._mistyped(field, "true or false", value)

    def integer(self, field: str, low: int, high: int = INT64) -> int | None:
        """An integer, low <= value <= high."""
        value = self.raw(field)
        if value is None:
            return None
        if isinstance(value, bool) or not isinstance(value, int):
            raise self._mistyped(field, "an integer", value)
        if not low <= value <= high:
            limits = f"at least {low}" if high == INT64 and value < low else f"between {low} and {high}"
            raise RequestError(f"{self.name(field)} must be {limits}, not {shown_json(value)}", param=self.name(field))
        return value

    def number(self, field: str) -> float | None:
        """A number, as a float; its bounds are its user's business."""
        value = self.raw(field)
        if value is None:
            return None
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise self._mistyped(field, "a number", value)
        if abs(value) > INT64:
            raise RequestError(f"{self.name(field)} is out of range: {shown_json(value)}", param=self.name(field))
        return float(value)

    def array(self, field: str) -> list[Any] | None:
        """An array."""
        value = self.raw(field)
        if value is None or isinstance(value, list):
            return value
        raise self._mistyped(field, "an array", value)

    def object(self, field: str) -> Fields | None:
        """An object."""
        value = self.raw(field)
        if value is None:
            return None
        if isinstance(value, dict):
            return Fields(value, self.name(field))
        raise self._mistyped(field, "an object", value)

    def tolerate(self, *fields: str) -> None:
        """Count fields as known though nothing is done with them."""
        self._asked.update(fields)

    def refuse(self, field: str, reason: str, *, unless: tuple[Any, ...] = ()) -> None:
        """Raise RequestError when a field asks for what this server cannot do.

        Absent, null, an empty array and the values in ``unless`` ask for nothing.
        """
        value = self.raw(field)
        if value is not None and value != [] and value not in unless:
            raise RequestError(
                f"{self.name(field)} is not supported: {reason}. Leave it out.",
                param=self.name(field),
                code="unsupported_parameter",
            )

    def items(self) -> list[tuple[str, Any]]:
        """All fields that are not null, for objects whose keys are data."""
        return [(key, value) for key, value in self._values.items() if value is not None]

    def unknown(self) -> list[str]:
        """Fields that came and that nobody asked for."""
        return [self.name(field) for field in self._values if field not in self._asked]

    def _mistyped(self, field: str, wanted: str, value: Any) -> RequestError:
        return mistyped_json(self.name(field), wanted, value)


def missing(name: str) -> RequestError:
    """The error of a field that must be there."""
    return RequestError(f"{name} is required", param=name, code="missing_required_parameter")
