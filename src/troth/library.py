"""The Python face: open a model, chat, complete, stream; blocking or async. Built on the same engine as the server.

    with troth.Engine.open("path/to/model.gguf") as engine:
        print(engine.chat("What is the capital of France?", temperature=0).text)

Refuses to know about scheduling and tensors; ``compose.py`` builds what stands behind it.
"""

from __future__ import annotations

import secrets
import uuid
import weakref
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Self

from troth import compose
from troth.config.options import EngineOptions, ModelOptions
from troth.contracts.bounds import mistyped, require_flag
from troth.contracts.events import Completed, Event, Failed, FinishReason, Segment, Timings, TokenText, Usage
from troth.contracts.failures import error_from_event
from troth.contracts.memory_plan import MemoryPlan
from troth.contracts.names import RequestId
from troth.contracts.plan import TokenLogprobs
from troth.contracts.ports import EngineInfo, EngineStatus
from troth.contracts.progress import LoadProgress, no_progress
from troth.contracts.request import Request

if TYPE_CHECKING:
    from troth.run.stream import RequestStream
    from troth.run.worker import EngineThread
    from troth.text.prompt import Prompt

Messages = str | Sequence[Mapping[str, Any]]
"""A conversation, or one user message."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Reply:
    """A whole answer."""

    text: str
    finish_reason: FinishReason
    usage: Usage
    timings: Timings
    seed: int
    """Give it back to get the same answer again."""
    tokens: tuple[TokenText, ...] = ()
    """Every emitted token, when log-probabilities were asked for."""
    prompt_logprobs: tuple[TokenLogprobs, ...] | None = None


class AnswerStream:
    """An answer under way: iterate it, blocking or async, for its segments; then ``reply`` holds the whole.

    Leaving it (``with``, ``async with``, or dropping it) cancels what is left.
    """

    def __init__(self, stream: RequestStream, engine: Engine) -> None:
        self._stream = stream
        self._engine = engine
        """Held, because an engine that nobody holds is closed."""
        self._segments: list[Segment] = []
        self._reply: Reply | None = None

    @property
    def reply(self) -> Reply:
        """The whole answer. Raises RuntimeError while it is still being streamed."""
        if self._reply is None:
            raise RuntimeError("the answer is not complete; iterate the stream to its end first")
        return self._reply

    def cancel(self) -> None:
        """Stop generating; iteration then ends with what there is."""
        self._stream.cancel()

    def events(self) -> Iterator[Event]:
        """Every event, progress included, up to and with the last. Raises what ended the request."""
        for event in self._stream:
            self._take(event)
            yield event

    async def events_async(self) -> AsyncIterator[Event]:
        """As ``events``."""
        async for event in self._stream:
            self._take(event)
            yield event

    def __iter__(self) -> Iterator[Segment]:
        return (event for event in self.events() if isinstance(event, Segment))

    async def __aiter__(self) -> AsyncIterator[Segment]:
        async for event in self.events_async():
            if isinstance(event, Segment):
                yield event

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.cancel()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *exception: object) -> None:
        self.cancel()

    def _take(self, event: Event) -> None:
        if isinstance(event, Segment):
            self._segments.append(event)
        elif isinstance(event, Failed):
            raise error_from_event(event)
        elif isinstance(event, Completed):
            self._reply = Reply(
                text="".join(segment.text for segment in self._segments if segment.kind == "text"),
                finish_reason=event.finish_reason,
                usage=event.usage,
                timings=event.timings,
                seed=event.seed,
                tokens=tuple(token for segment in self._segments for token in segment.tokens),
                prompt_logprobs=event.prompt_logprobs,
            )


class Engine:
    """One loaded model. Thread-safe: any number of threads and tasks may ask at once, and share its batch.

    It is closed by ``close``, by leaving its ``with``, when nobody holds it or a stream of it any more, or when the
    program ends.
    """

    def __init__(self, thread: EngineThread, text: compose.TextSide) -> None:
        self._thread = thread
        # A thread that is still computing while the interpreter goes away under it would abort the program.
        weakref.finalize(self, thread.close)
        self._text = text
        self._prompts = text.prompts(thread.info.context_tokens)

    @classmethod
    def open(
        cls,
        model: str | None = None,
        *,
        model_options: ModelOptions | None = None,
        engine_options: EngineOptions | None = None,
        progress: LoadProgress = no_progress,
    ) -> Self:
        """Load a model.

        Args:
            model: a folder or .gguf file; None: the demo model, if it is installed.
            model_options: device, numbers, context; ``model`` wins over the one inside.
            engine_options: rows, chunks, queue, threads.
            progress: told how far loading is.

        Raises:
            ModelLoadError: it cannot be loaded or does not fit.
            OptionError: an option cannot be honoured here.
        """
        options = model_options or ModelOptions()
        if model is not None:
            options = replace(options, model=model)
        engine_options = engine_options or EngineOptions()
        artifact = compose.find(options)
        text = compose.load_text(artifact, options)
        planned = compose.plan(artifact, options, engine_options)
        return cls(compose.start_engine(planned, text, engine_options, progress), text)

    @property
    def info(self) -> EngineInfo:
        """What was loaded and how."""
        return self._thread.info

    @property
    def plan(self) -> MemoryPlan:
        """Where the memory went."""
        return self._thread.info.plan

    def status(self) -> EngineStatus:
        """Rows, queue, blocks and totals now."""
        return self._thread.status_now()

    def chat(self, messages: Messages, **options: Any) -> Reply:
        """Answer a conversation; ``options`` as ``stream``."""
        return _drain(self.stream(messages, **options))

    def complete(self, prompt: str | Sequence[int], **options: Any) -> Reply:
        """Continue a text, or token ids, without a template; ``options`` as ``stream``."""
        return _drain(self.stream_completion(prompt, **options))

    async def chat_async(self, messages: Messages, **options: Any) -> Reply:
        """As ``chat``."""
        return await _drain_async(self.stream(messages, **options))

    async def complete_async(self, prompt: str | Sequence[int], **options: Any) -> Reply:
        """As ``complete``."""
        return await _drain_async(self.stream_completion(prompt, **options))

    def stream(
        self,
        messages: Messages,
        *,
        template_variables: Mapping[str, Any] | None = None,
        **options: Any,
    ) -> AnswerStream:
        """Answer a conversation piece by piece.

        Args:
            messages: [{"role": ..., "content": ...}], or one user message as a string.
            template_variables: handed to the chat template (``enable_thinking`` and the like).
            options: ``max_tokens``, ``stop`` (string or list), ``ignore_eos``, ``priority``, ``prompt_cache``, and the
                fields of ``contracts.sampling.SamplingParams``.

        Raises:
            RequestError: a message or option is wrong; refusals by the engine come from the stream.
        """
        if isinstance(messages, str):
            messages = [{"role": "user", "content": messages}]
        if template_variables is not None:
            _require_names(template_variables)
        return self._submit(self._prompts.chat(messages, variables=template_variables), options)

    def stream_completion(self, prompt: str | Sequence[int], **options: Any) -> AnswerStream:
        """Continue a text, or token ids, piece by piece; ``options`` as ``stream``."""
        built = self._prompts.completion(prompt) if isinstance(prompt, str) else self._prompts.token_ids(prompt)
        return self._submit(built, options)

    def close(self) -> None:
        """End running requests and give the memory back. Idempotent."""
        self._thread.close()

    async def close_async(self) -> None:
        """As ``close``."""
        await self._thread.aclose()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *exception: object) -> None:
        await self.close_async()

    def _submit(self, prompt: Prompt, options: Mapping[str, Any]) -> AnswerStream:
        return AnswerStream(self._thread.submit(self._request(prompt, options)), self)

    def _request(self, prompt: Prompt, options: Mapping[str, Any]) -> Request:
        """Prompt and options as the engine takes them. ``Request`` and ``SamplingParams`` check the values."""
        given = {name: value for name, value in options.items() if value is not None}
        stop, ignore_eos = given.pop("stop", ()), given.pop("ignore_eos", False)
        require_flag("ignore_eos", ignore_eos)
        if isinstance(given.get("logit_bias"), Mapping):
            given["logit_bias"] = tuple(given["logit_bias"].items())
        limits = {name: given.pop(name) for name in ("max_tokens", "prompt_cache", "priority") if name in given}
        return Request(
            request_id=RequestId(uuid.uuid4().hex),
            prompt_ids=prompt.ids,
            eos_ids=frozenset() if ignore_eos else self._text.tokenizer.eos_ids,
            stop=(stop,) if isinstance(stop, str) else tuple(stop) if isinstance(stop, list) else stop,
            boundary=prompt.boundary,
            continues_text=prompt.continues_text,
            sampling=self._text.defaults.sampling(**{"seed": secrets.randbits(64)} | given),
            **limits,
        )


def _require_names(variables: object) -> None:
    if not isinstance(variables, Mapping) or not all(isinstance(name, str) for name in variables):
        raise mistyped("template_variables", "a mapping of names to values", variables)


def _drain(stream: AnswerStream) -> Reply:
    for _ in stream.events():
        pass
    return stream.reply


async def _drain_async(stream: AnswerStream) -> Reply:
    async for _ in stream.events_async():
        pass
    return stream.reply
