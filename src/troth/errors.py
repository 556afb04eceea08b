"""The one error tree, sorted by who must act.

    TrothError
    |-- OptionError               the user: a flag, an option or an environment variable
    |-- ModelLoadError            the user: an artifact that is missing, damaged or not supported
    |-- RequestError              the caller: this request cannot be served as written (HTTP 400)
    |   |-- ContextExceeded       prompt + max_tokens do not fit (code context_length_exceeded)
    |   |-- CapabilityUnavailable a feature asked for by name that this model or build lacks
    |   `-- UnknownModel          no such model here (HTTP 404)
    |-- Busy                      nobody: the queue is full, try again later (HTTP 429)
    |-- NotReady                  nobody: the model is still loading (HTTP 503)
    |-- Cancelled                 the caller: it went away, asked to stop, or did not read
    |-- StreamProtocol            us: a stream broke its own rules (a bug)
    `-- DeviceError               the machine: a kernel or the device failed
        `-- OutOfMemory           with the bytes wanted and the bytes free

Messages name the value, the place and the next action. HTTP maps each class once, in ``serve/errors.py``.
"""

from __future__ import annotations


class TrothError(Exception):
    """Root of every error this package raises on purpose."""


class OptionError(TrothError):
    """An option, flag or environment variable has a value that cannot be used."""


class ModelLoadError(TrothError):
    """An artifact cannot be loaded. ``path`` and ``field`` say where the reader stopped."""

    def __init__(self, message: str, *, path: str = "", field: str = "") -> None:
        place = ": ".join(part for part in (path, field) if part)
        super().__init__(f"{place}: {message}" if place else message)
        self.path = path
        self.field = field


class RequestError(TrothError):
    """A request that can never be served as written.

    ``param`` is the request field at fault, ``code`` a stable machine-readable word.
    """

    def __init__(self, message: str, *, param: str | None = None, code: str = "invalid_value") -> None:
        super().__init__(message)
        self.param = param
        self.code = code


class ContextExceeded(RequestError):
    """Prompt and requested output do not fit into the context. Nothing is ever truncated instead."""

    def __init__(
        self, *, num_prompt_tokens: int, max_tokens: int, limit: int, at_least: bool = False, param: str = "messages"
    ) -> None:
        prompt = (
            f"{'at least ' if at_least else ''}{num_prompt_tokens} {'token' if num_prompt_tokens == 1 else 'tokens'}"
        )
        answer = f"{max_tokens} more {'was' if max_tokens == 1 else 'were'} requested for the answer"
        super().__init__(
            f"This model's maximum context length is {limit} tokens; the prompt has {prompt} and {answer}. "
            "Shorten the prompt or lower max_tokens.",
            param=param,
            code="context_length_exceeded",
        )
        self.num_prompt_tokens = num_prompt_tokens
        self.max_tokens = max_tokens
        self.limit = limit


class CapabilityUnavailable(RequestError):
    """A capability asked for by name that cannot serve this request; never a silent fallback."""

    def __init__(self, capability: str, reason: str, *, param: str | None = None) -> None:
        super().__init__(f"{capability} is not available: {reason}", param=param, code="capability_unavailable")
        self.capability = capability
        self.reason = reason


class UnknownModel(RequestError):
    """The named model is not served here."""

    def __init__(self, model: str, known: tuple[str, ...]) -> None:
        names = ", ".join(known) or "none"
        super().__init__(
            f"The model {model!r} is not served here. Served: {names}.", param="model", code="model_not_found"
        )


class Busy(TrothError):
    """The waiting queue is full. ``retry_after_s`` is a hint for the client."""

    def __init__(self, message: str, *, retry_after_s: float = 1.0) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class NotReady(TrothError):
    """The model is loading or its engine is restarting. ``retry_after_s`` is a hint for the client."""

    def __init__(self, message: str, *, retry_after_s: float = 2.0) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class Cancelled(TrothError):
    """The request was cancelled. ``reason``: requested, disconnected, consumer_idle, timeout or engine_closed."""

    def __init__(self, reason: str) -> None:
        super().__init__(f"the request was cancelled: {reason}")
        self.reason = reason


class StreamProtocol(TrothError):
    """A stream broke its own rules. This is a bug in the engine, never the caller's fault."""


class DeviceError(TrothError):
    """The device or a kernel failed. Rows that were in the step lose their state."""


class DeviceLost(DeviceError):
    """The device answers no more, to nobody. This engine is over; one in a new process may do better."""


class OutOfMemory(DeviceError):
    """The device has no room. ``wanted_bytes`` and ``free_bytes`` are what the allocator reported."""

    def __init__(self, message: str, *, wanted_bytes: int, free_bytes: int) -> None:
        super().__init__(f"{message}: wanted {wanted_bytes} bytes, free {free_bytes} bytes")
        self.wanted_bytes = wanted_bytes
        self.free_bytes = free_bytes
