"""Errors as the last event of a stream, and back. The class survives the way through queues and processes."""

from __future__ import annotations

from troth import errors
from troth.contracts.events import Failed
from troth.errors import Busy, Cancelled, ContextExceeded, NotReady, OutOfMemory, RequestError, TrothError


def failure_event(error: TrothError) -> Failed:
    """The event that tells a consumer of this error."""
    numbers: dict[str, int] = {}
    for cls, names in _NUMBERS.items():
        if isinstance(error, cls):
            numbers = {name: getattr(error, name) for name in names}
    return Failed(
        kind=type(error).__name__,
        message=str(error),
        param=error.param if isinstance(error, RequestError) else None,
        code=error.code if isinstance(error, RequestError) else None,
        retry_after_s=error.retry_after_s if isinstance(error, Busy | NotReady) else None,
        reason=error.reason if isinstance(error, Cancelled) else None,
        numbers=numbers,
    )


def error_from_event(event: Failed) -> TrothError:
    """The error a Failed event tells of, of the same class and with the same message and fields."""
    cls = getattr(errors, event.kind, TrothError)
    if not (isinstance(cls, type) and issubclass(cls, TrothError)):
        cls = TrothError
    error: TrothError = cls.__new__(cls)
    # The constructors compose messages from their arguments; this one is composed already.
    Exception.__init__(error, event.message)
    fields = {
        "param": event.param,
        "code": event.code,
        "retry_after_s": event.retry_after_s,
        "reason": event.reason,
    }
    for name, value in (fields | event.numbers).items():
        setattr(error, name, value)
    return error


_NUMBERS: dict[type[TrothError], tuple[str, ...]] = {
    ContextExceeded: ("num_prompt_tokens", "max_tokens", "limit"),
    OutOfMemory: ("wanted_bytes", "free_bytes"),
}
