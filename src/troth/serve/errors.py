"""The one table from errors to HTTP, in the OpenAI shape.

Every class of ``troth.errors`` is mapped here and nowhere else; an engine's Failed event is looked up by the class it
names. Read next: ``generation.py``, which decides whether an error becomes a status or a line in a stream.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Final

import msgspec
from starlette.responses import Response

from troth.contracts.events import Failed
from troth.errors import TrothError

_INVALID: Final = "invalid_request_error"
_SERVER: Final = "server_error"


@dataclass(frozen=True, slots=True)
class _Row:
    status: int
    type: str
    code: str | None
    """None: the error's own."""
    retry: bool = True
    """False tells clients that trying again is no use (x-should-retry); they retry every 5xx otherwise."""


_TABLE: Final[dict[str, _Row]] = {
    "RequestError": _Row(400, _INVALID, None),
    "ContextExceeded": _Row(400, _INVALID, None),
    "CapabilityUnavailable": _Row(400, _INVALID, None),
    "UnknownModel": _Row(404, _INVALID, None),
    "Busy": _Row(429, "rate_limit_error", "busy"),
    "NotReady": _Row(503, _SERVER, "not_ready"),
    "Cancelled": _Row(503, _SERVER, "cancelled"),
    "OutOfMemory": _Row(500, _SERVER, "out_of_memory"),
    "DeviceError": _Row(500, _SERVER, "device_error"),
    "DeviceLost": _Row(500, _SERVER, "device_lost"),
    "StreamProtocol": _Row(500, _SERVER, "internal_error"),
    "ModelLoadError": _Row(500, _SERVER, "model_load_error", retry=False),
    "OptionError": _Row(500, _SERVER, "option_error", retry=False),
    "TrothError": _Row(500, _SERVER, "internal_error"),
}
_DEFAULT_RETRY_AFTER_S: Final = 1.0
_MAX_MESSAGE: Final = 1000
"""Characters; a message may quote what the client sent."""


class HttpError(TrothError):
    """A refusal that only HTTP knows: no route, no key, a body too large."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        code: str,
        headers: dict[str, str] | None = None,
        retry: bool = True,
    ) -> None:
        super().__init__(message)
        self.row = _Row(status, _INVALID if status < 500 else _SERVER, code, retry)
        self.headers = headers or {}


class EngineFailure(TrothError):
    """An engine ended a request with Failed; carries the event to where it is answered."""

    def __init__(self, failed: Failed) -> None:
        super().__init__(failed.message)
        self.failed = failed


def error_object(error: TrothError) -> dict[str, Any]:
    """``{"error": {...}}`` in the OpenAI shape."""
    source = error.failed if isinstance(error, EngineFailure) else error
    row, message = _row(error), str(error)
    return {
        "error": {
            "message": message if len(message) <= _MAX_MESSAGE else f"{message[:_MAX_MESSAGE]}...",
            "type": row.type,
            "param": getattr(source, "param", None),
            "code": row.code or getattr(source, "code", None),
        }
    }


def error_response(error: TrothError) -> Response:
    """The whole reply to a request that failed before its answer began."""
    row = _row(error)
    headers = dict(error.headers) if isinstance(error, HttpError) else {}
    if row.status in (429, 503):
        source = error.failed if isinstance(error, EngineFailure) else error
        retry_after_s = getattr(source, "retry_after_s", None) or _DEFAULT_RETRY_AFTER_S
        headers["retry-after"] = str(max(1, math.ceil(retry_after_s)))
    if not row.retry:
        headers["x-should-retry"] = "false"
    body = msgspec.json.encode(error_object(error))
    return Response(body, row.status, headers, media_type="application/json")


def internal_error() -> TrothError:
    """What a client is told of a bug; the server's log has the rest."""
    return TrothError("an internal error ended this request; the server's log has the details")


def _row(error: TrothError) -> _Row:
    if isinstance(error, HttpError):
        return error.row
    if isinstance(error, EngineFailure):
        return _TABLE.get(error.failed.kind, _TABLE["TrothError"])
    return next(_TABLE[cls.__name__] for cls in type(error).__mro__ if cls.__name__ in _TABLE)
