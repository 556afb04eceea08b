"""The Python face: open a model, chat, complete, stream; blocking or async. Built on the same engine as the server.

    with troth.Engine.open("path/to/model.gguf") as engine:
        print(engine.chat("What is the capital of France?", temperature=0).text)

Refuses to know about scheduling and tensors; ``compose.py`` builds what stands behind it. Next:
``request_builder.py`` (what may be asked), ``answer_stream.py`` (what comes back).
"""

from __future__ import annotations

import weakref
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Self

from troth import compose
from troth.answer_stream import AnswerStream, Reply
from troth.config.options import EngineOptions, ModelOptions
from troth.contracts.memory_plan import MemoryPlan
from troth.contracts.ports import EngineInfo, EngineStatus
from troth.contracts.prefix_cache import PinnedPrefix
from troth.contracts.progress import LoadProgress, no_progress
from troth.contracts.request import Request
from troth.request_builder import Messages, RequestBuilder

if TYPE_CHECKING:
    from troth.run.worker import EngineThread


class Engine:
    """One loaded model. Thread-safe: any number of threads and tasks may ask at once, and share its batch.

    It is closed by ``close``, by leaving its ``with``, when nobody holds it or a stream of it any more, or when the
    program ends.
    """

    def __init__(self, thread: EngineThread, text: compose.TextSide) -> None:
        self._thread = thread
        # A thread that is still computing while the interpreter goes away under it would abort the program.
        weakref.finalize(self, thread.close)
        self._requests = RequestBuilder(text, thread.info.context_tokens, thread.info.vocab_size)

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
        return cls(compose.start_engine(planned, text, progress), text)

    @property
    def info(self) -> EngineInfo:
        """What was loaded and how."""
        return self._thread.info

    @property
    def plan(self) -> MemoryPlan:
        """Where the memory went."""
        return self._thread.info.plan

    @property
    def has_rehearsed(self) -> bool:
        """Whether a GPU's kernels for the model's steps are compiled, which is done while there is no request.

        A rehearsal that failed is over, too, and among ``status().downgrades``. Drafting models are not part of it.
        """
        return not self._thread.has_idle_work

    def status(self) -> EngineStatus:
        """Rows, queue, blocks and totals now."""
        return self._thread.status_now()

    def chat(self, messages: Messages, **options: Any) -> Reply:
        """Answer a conversation; ``options`` as ``stream``."""
        return _drain(self.stream(messages, **options))

    def complete(self, prompt: str | Sequence[int], **options: Any) -> Reply:
        """Continue a text, or token ids, without a template; ``options`` as ``stream``."""
        return self.complete_all([prompt], **options)[0]

    def complete_all(self, prompts: Sequence[str | Sequence[int]], **options: Any) -> list[Reply]:
        """Continue several texts together, each with the same ``options``; the replies in order.

        Raises:
            TrothError: what ended one of them; the others are given up.
        """
        requests = [self._requests.completion(prompt, options) for prompt in prompts]
        # By name: a traceback that somebody keeps holds the streams, and would let them run to their ends.
        with ExitStack() as given_up:
            streams = [given_up.enter_context(self._submit(one, whole=True)) for one in requests]
            return [_drain(stream) for stream in streams]

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
            messages: [{"role": ..., "content": ...}], or one user message as a string. A final assistant message of
                text is continued, not answered.
            template_variables: handed to the chat template as they are.
            options: ``tools`` (as in the OpenAI API), ``tool_choice``, ``parallel_tool_calls``, ``tool_validation``
                (strict or forward), ``thinking`` (True, False; None leaves it to the template), ``reasoning_effort``,
                ``reasoning_budget`` (most tokens of reasoning), ``max_tokens``, ``stop`` (string or list),
                ``response_format`` (a mapping as in the OpenAI API), ``grammar`` (a ``contracts.grammar.Grammar``),
                ``ignore_eos``, ``priority``, ``prompt_cache``, ``cache_salt`` (only requests with the same one share
                cached prompts), ``speculation`` (who drafts tokens: ``"ngram"``, ``"grammar"``, ``"mtp"``,
                ``"draft"``, several
                between commas, ``"off"``, or a ``contracts.speculation.Speculation``; without it what the engine's
                options say), ``prediction`` (a text that the answer repeats in large part, which is then written
                faster), and the fields of ``contracts.sampling.SamplingParams``.

        Raises:
            RequestError: a message or option is wrong; refusals by the engine come from the stream.
        """
        return self._submit(self._requests.chat(messages, template_variables, options))

    def stream_completion(self, prompt: str | Sequence[int], **options: Any) -> AnswerStream:
        """Continue a text, or token ids, piece by piece; ``options`` as ``stream``, tools and thinking aside."""
        return self._submit(self._requests.completion(prompt, options))

    def warm(
        self,
        messages: Messages | None = None,
        *,
        prompt: str | Sequence[int] | None = None,
        name: str | None = None,
        template_variables: Mapping[str, Any] | None = None,
        **options: Any,
    ) -> PinnedPrefix:
        """Compute a prefix before anybody asks for it, and pin it until it is unpinned; waits until that is done.

        Args:
            messages: as ``stream`` takes them. Of system prompts alone what all conversations begin with is kept, of a
                conversation all but the opening of the next answer.
            prompt: a text or token ids, in place of messages.
            name: takes the place of an older pin of this name; None: named after the tokens.
            template_variables, options: what changes how a chat is rendered (tools, thinking), and ``cache_salt``.

        Returns:
            What is kept, in whole blocks of 16 tokens.

        Raises:
            RequestError: an option is wrong, nothing is left to pin, or the largest request would not fit beside it.
        """
        request = self._requests.prefix(messages, prompt, name, template_variables, options)
        _drain(self._submit(request, whole=True))
        status = self.status().prefix_cache
        removed = PinnedPrefix(name=request.pin or "", num_tokens=0, num_bytes=0)  # by somebody else, meanwhile
        return next((pin for pin in status.pins if pin.name == request.pin), removed) if status else removed

    def unpin(self, name: str) -> None:
        """Let a prefix go with what else is cached; of one that is not there nothing happens."""
        self._thread.unpin(name)

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

    def _submit(self, request: Request, *, whole: bool = False) -> AnswerStream:
        return AnswerStream(self._thread.submit(request, whole=whole), self)


def _drain(stream: AnswerStream) -> Reply:
    with stream:
        for _ in stream.events():
            pass
    return stream.reply


async def _drain_async(stream: AnswerStream) -> Reply:
    async with stream:
        async for _ in stream.events_async():
            pass
    return stream.reply
