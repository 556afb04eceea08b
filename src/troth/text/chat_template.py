"""Owns one chat template: messages in, the text of the prompt out.

Knows no token and no role rules; ``messages.py`` prepares the messages, ``prompt.py`` encodes the text. The dialect is
that of Hugging Face's ``apply_chat_template``. Read next: ``template_sandbox.py``, ``template_source.py``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from typing import Any, Final

from jinja2.exceptions import TemplateError

from troth.errors import ModelLoadError, RequestError
from troth.text.template_budget import MAX_STEPS, STEPS_PER_CHARACTER, STEPS_PER_MESSAGE, TooMuchWork
from troth.text.template_sandbox import Refused, TemplateEnvironment

MAX_SOURCE_BYTES: Final = 2**20
MAX_TIME_PATTERN: Final = 256

# What a template's own code can raise beside Jinja's errors: wrong types, missing keys, numbers, depth, size.
_TEMPLATE_FAULTS: Final = (
    TemplateError,
    ArithmeticError,
    AttributeError,
    LookupError,
    MemoryError,
    RecursionError,
    TypeError,
    ValueError,
)


class ChatTemplate:
    """A compiled template. Rendering has no side effects and may run in several threads at once."""

    def __init__(
        self,
        source: str,
        *,
        bos_token: str | None,
        eos_token: str | None,
        now: Callable[[], datetime] = datetime.now,
        path: str = "chat_template",
        max_steps: int = MAX_STEPS,
    ) -> None:
        """Compile ``source``.

        Args:
            source: Jinja, at most 1 MiB.
            bos_token: Text of the BOS token; undefined in the template when None. ``eos_token`` likewise.
            now: Clock behind ``strftime_now``.
            path: Where the source comes from, for errors.
            max_steps: Budget of one render, beside what it gains with the conversation (``template_budget.py``).

        Raises:
            ModelLoadError: too long, or not a template.
        """
        num_bytes = len(source.encode("utf-8", "surrogatepass"))
        if num_bytes > MAX_SOURCE_BYTES:
            raise ModelLoadError(f"has {num_bytes} bytes; {MAX_SOURCE_BYTES} are allowed", path=path)
        self.source: Final = source
        self.now: Final = now
        self._max_steps = max_steps
        self._environment = TemplateEnvironment()
        self._environment.globals["strftime_now"] = lambda pattern: _time_text(now(), pattern)
        named = {"bos_token": bos_token, "eos_token": eos_token}
        self._environment.globals.update({name: text for name, text in named.items() if text is not None})
        try:
            with self._environment.budget.filled(max_steps):
                self._template = self._environment.from_string(source)
        except (*_TEMPLATE_FAULTS, SyntaxError) as error:
            line = getattr(error, "lineno", None)
            place = f" in line {line}" if line else ""
            raise ModelLoadError(f"is not a chat template{place}: {_explain(error)}", path=path) from error

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        variables: Mapping[str, Any] | None = None,
        max_steps: int | None = None,
    ) -> str:
        """The prompt text of a conversation.

        Args:
            messages: Plain JSON values.
            tools: Tool declarations as plain JSON; None leaves ``tools`` undefined.
            add_generation_prompt: End with the opening of the assistant's turn.
            variables: Further names for the template, such as ``enable_thinking``. They do not replace the above.
            max_steps: Another budget than the template's own.

        Raises:
            RequestError: the template refused the conversation, failed on it, or did too much work.
        """
        values: dict[str, Any] = {
            **(variables or {}),
            "messages": messages,
            "add_generation_prompt": add_generation_prompt,
        }
        if tools is not None:
            values["tools"] = tools
        num_steps = (
            (self._max_steps if max_steps is None else max_steps)
            + STEPS_PER_MESSAGE * len(messages)
            + STEPS_PER_CHARACTER * _num_characters([messages, tools])
        )
        try:
            with self._environment.budget.filled(num_steps):
                return self._template.render(values)
        except Refused as error:
            raise RequestError(f"the chat template refuses this conversation: {error}", param="messages") from error
        except _TEMPLATE_FAULTS as error:
            raise RequestError(
                f"the chat template failed on this conversation: {_explain(error)}", param="messages"
            ) from error


def _time_text(moment: datetime, pattern: str) -> str:
    if len(pattern) > MAX_TIME_PATTERN:
        raise TooMuchWork(f"strftime_now takes {MAX_TIME_PATTERN} characters, not {len(pattern)}")
    return moment.strftime(pattern)


def _num_characters(value: object) -> int:
    """Characters of all texts in a JSON value."""
    total, waiting = 0, [value]
    while waiting:
        item = waiting.pop()
        if isinstance(item, str):
            total += len(item)
        elif isinstance(item, Mapping):
            waiting += item.values()
        elif isinstance(item, (list, tuple)):
            waiting += item
    return total


def _explain(error: BaseException) -> str:
    if isinstance(error, RecursionError):
        return "it nests too deeply"
    return str(error) or type(error).__name__
