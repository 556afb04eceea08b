"""The real library face over scripted answers, one token per byte, for tests of the command line."""

from __future__ import annotations

import io
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

from troth.contracts.capabilities import TemplateCapabilities
from troth.contracts.events import Completed, Event, Segment, Usage
from troth.contracts.failures import failure_event
from troth.contracts.ports import EngineInfo
from troth.contracts.request import Request
from troth.contracts.sampling import SamplingParams
from troth.errors import ContextExceeded
from troth.library import Engine
from troth.request_builder import RequestBuilder
from troth.testing.byte_tokenizer import BytePrompts, ByteTokenizer
from troth.testing.fake_answer import FakeAnswer, play
from troth.testing.fake_engine import FakeEngine

Script = Callable[[Request], FakeAnswer]


class ScriptedThread:
    """Stands where the library has its engine's thread. ``on_event`` may raise, or signal, in mid-answer."""

    def __init__(self, script: Script, context_tokens: int, on_event: Callable[[Event], None]) -> None:
        self.info: EngineInfo = FakeEngine(model="scripted", context_tokens=context_tokens).info
        self.requests: list[Request] = []
        self.num_cancelled = 0
        self.is_closed = False
        self.num_idle_pieces = 2
        """Left to do: one fewer each time that somebody asks."""
        self._script = script
        self._on_event = on_event

    @property
    def has_idle_work(self) -> bool:
        self.num_idle_pieces -= 1
        return self.num_idle_pieces >= 0

    def submit(self, request: Request, *, whole: bool = False) -> ScriptedStream:
        self.requests.append(request)
        return ScriptedStream(self, request)

    def events(self, request: Request) -> Iterator[Event]:
        room = self.info.context_tokens - len(request.prompt_ids)
        if room < 1:
            wanted = request.max_tokens or 1
            yield failure_event(
                ContextExceeded(
                    num_prompt_tokens=len(request.prompt_ids), max_tokens=wanted, limit=self.info.context_tokens
                )
            )
            return
        for step in play(self._script(request), request, room):
            for event in step:
                yield event
                self._on_event(event)

    def close(self) -> None:
        self.is_closed = True


class ScriptedStream:
    """Blocking iteration over one script, ended early by ``cancel``."""

    def __init__(self, thread: ScriptedThread, request: Request) -> None:
        self._thread = thread
        self._request = request
        self._events = thread.events(request)
        self._num_emitted = 0
        self._ended = self._cancelled = False

    def cancel(self, reason: str = "requested") -> None:
        if not self._ended and not self._cancelled:
            self._cancelled = True
            self._thread.num_cancelled += 1

    def __iter__(self) -> Iterator[Event]:
        for event in self._events:
            if self._cancelled:
                break
            if isinstance(event, Segment):
                self._num_emitted = event.num_completion_tokens
            self._ended = isinstance(event, Completed)
            yield event
        if self._cancelled:
            usage = Usage(num_prompt_tokens=len(self._request.prompt_ids), num_completion_tokens=self._num_emitted)
            yield Completed(finish_reason="aborted", usage=usage, seed=self._request.sampling.seed)


class Person(io.StringIO):
    """A stream with a person at its other end."""

    def isatty(self) -> bool:
        return True


class EngineOpener:
    """Replaces ``cli.session.open_engine``; keeps what it loaded, and what for: nothing when it was refused before."""

    early_limit: int | None = None
    """Tokens at which the prompt builder itself refuses, before the engine is asked."""

    def __init__(
        self,
        answer: str | FakeAnswer | Script = "Hello.",
        *,
        context_tokens: int = 8192,
        declared_tokens: int | None = None,
        on_event: Callable[[Event], None] = lambda event: None,
        capabilities: TemplateCapabilities | None = None,
    ) -> None:
        self._capabilities = capabilities or TemplateCapabilities()
        self._declared_tokens = declared_tokens or context_tokens
        script = (
            answer
            if callable(answer)
            else lambda request: answer if isinstance(answer, FakeAnswer) else FakeAnswer(text=answer)
        )
        self.thread = ScriptedThread(script, context_tokens, on_event)
        self.options: list[Any] = []

    def __call__(self, model: Any, engine: Any, progress: Any, check: Any = lambda builder, limit: None) -> Engine:
        text = SimpleNamespace(
            prompts=lambda context_tokens: BytePrompts(self.early_limit),
            tokenizer=ByteTokenizer(),
            capabilities=self._capabilities,
            calls=None,
            defaults=SimpleNamespace(sampling=lambda **values: SamplingParams(**values)),
        )
        most_tokens = self._declared_tokens
        check(RequestBuilder(text, most_tokens, ByteTokenizer().vocab_size), most_tokens)  # type: ignore[arg-type]
        self.options += [model, engine]
        progress("reading weights", 1, 2)
        return Engine(self.thread, text)  # type: ignore[arg-type]

    def prompt(self, index: int = -1) -> str:
        """The text of one of the prompts that were asked."""
        return bytes(self.thread.requests[index].prompt_ids).decode()
