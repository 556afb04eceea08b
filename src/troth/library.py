"""The Python face: open a model, chat, complete, stream; blocking or async. Built on the same engine as the server.

    with troth.Engine.open("path/to/model.gguf") as engine:
        print(engine.chat("What is the capital of France?", temperature=0).text)

Refuses to know about scheduling and tensors; ``compose.py`` builds what stands behind it.
"""

from __future__ import annotations

import secrets
import uuid
import weakref
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Self

from troth import compose
from troth.answer_stream import AnswerStream, Reply
from troth.config.options import EngineOptions, ModelOptions
from troth.contracts.bounds import mistyped, require_flag
from troth.contracts.grammar import Grammar
from troth.contracts.memory_plan import MemoryPlan
from troth.contracts.names import RequestId
from troth.contracts.ports import EngineInfo, EngineStatus
from troth.contracts.prefix_cache import PinnedPrefix
from troth.contracts.progress import LoadProgress, no_progress
from troth.contracts.request import Request
from troth.contracts.sampling import SamplingParams
from troth.contracts.speculation import Speculation, read_speculation
from troth.errors import RequestError

if TYPE_CHECKING:
    from troth.run.worker import EngineThread
    from troth.text.chat_terms import ChatTerms
    from troth.text.prefix import PrefixIds
    from troth.text.prompt import Prompt

Messages = str | Sequence[Mapping[str, Any]]
"""A conversation, or one user message."""


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
        return cls(compose.start_engine(planned, text, progress), text)

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
        return self.complete_all([prompt], **options)[0]

    def complete_all(self, prompts: Sequence[str | Sequence[int]], **options: Any) -> list[Reply]:
        """Continue several texts together, each with the same ``options``; the replies in order.

        Raises:
            TrothError: what ended one of them; the others are given up.
        """
        built = [self._completion(prompt) for prompt in prompts]
        # By name: a traceback that somebody keeps holds the streams, and would let them run to their ends.
        with ExitStack() as given_up:
            streams = [given_up.enter_context(self._submit(one, options, whole=True)) for one in built]
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
                cached prompts), ``speculation`` (who drafts tokens: ``"ngram"``, ``"grammar"``, ``"mtp"``, several
                between commas, ``"off"``, or a ``contracts.speculation.Speculation``; without it what the engine's
                options say),
                ``prediction`` (a text that the answer repeats in large part, which is
                then written faster), and the fields of ``contracts.sampling.SamplingParams``.

        Raises:
            RequestError: a message or option is wrong; refusals by the engine come from the stream.
        """
        if isinstance(messages, str):
            messages = [{"role": "user", "content": messages}]
        if template_variables is not None:
            _require_names(template_variables)
        from troth.text.chat_terms import TERMS, read_terms
        from troth.text.messages import split_continued

        terms, capabilities = read_terms(options), self._text.capabilities
        terms.require_served(capabilities)
        variables = terms.variables(capabilities) | dict(template_variables or {})
        shown, continues = split_continued(messages)
        prompt = self._prompts.chat(shown, terms.shown_tools, variables=variables or None, continue_final=continues)
        rest = {name: value for name, value in options.items() if name not in TERMS}
        return self._submit(prompt, rest, terms)

    def stream_completion(self, prompt: str | Sequence[int], **options: Any) -> AnswerStream:
        """Continue a text, or token ids, piece by piece; ``options`` as ``stream``, tools and thinking aside."""
        return self._submit(self._completion(prompt), options)

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
        found = self._prefix(messages, prompt, template_variables, options)
        request = Request(
            request_id=RequestId(uuid.uuid4().hex),
            prompt_ids=found.ids,
            max_tokens=1,
            boundary=len(found.ids),
            checkpoint_positions=found.ends,
            namespace=options.get("cache_salt") or "",
            pin=name or found.name,
            sampling=SamplingParams(temperature=0.0),
        )
        _drain(AnswerStream(self._thread.submit(request, whole=True), self))
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

    def _prefix(
        self,
        messages: Messages | None,
        prompt: str | Sequence[int] | None,
        template_variables: Mapping[str, Any] | None,
        options: Mapping[str, Any],
    ) -> PrefixIds:
        from troth.text.chat_terms import TERMS, read_terms
        from troth.text.messages import normalise_messages
        from troth.text.prefix import PrefixIds, chat_prefix

        unknown = next((name for name in options if name not in (*TERMS, "cache_salt")), None)
        if unknown is not None:
            raise RequestError(f"{unknown!r} changes no prefix; leave it out", param=unknown)
        if (messages is None) == (prompt is None):
            raise RequestError("a prefix is made of messages or of a prompt; give one of them", param="messages")
        if prompt is not None:
            return PrefixIds(tuple(self._completion(prompt).ids))
        if isinstance(messages, str):
            messages = [{"role": "user", "content": messages}]
        if template_variables is not None:
            _require_names(template_variables)
        terms, capabilities = read_terms(options), self._text.capabilities
        terms.require_served(capabilities)
        variables = terms.variables(capabilities) | dict(template_variables or {})
        return chat_prefix(self._prompts, normalise_messages(messages), terms.shown_tools, variables or None)

    def _completion(self, prompt: str | Sequence[int]) -> Prompt:
        return self._prompts.completion(prompt) if isinstance(prompt, str) else self._prompts.token_ids(prompt)

    def _submit(
        self, prompt: Prompt, options: Mapping[str, Any], terms: ChatTerms | None = None, *, whole: bool = False
    ) -> AnswerStream:
        request = self._request(prompt, options)
        if terms is not None:
            request = self._on_terms(request, prompt, terms)
        return AnswerStream(self._thread.submit(request, whole=whole), self)

    def _on_terms(self, request: Request, prompt: Prompt, terms: ChatTerms) -> Request:
        """The request of a chat: how its answer is read, and the calls it must make."""
        from troth.text.chat_terms import ChatModel

        model = ChatModel(self._text.capabilities, self._text.tokenizer, self._text.calls)
        grammar = terms.bound(request.grammar, model, prompt.text, param="grammar")
        if grammar is not None and grammar != request.grammar:
            field = "grammar" if request.grammar is not None else terms.grammar_field
            self._text.grammars(self._thread.info.vocab_size).compile(grammar, param=field)
        reading = terms.reading(model, prompt.text, continues=prompt.continues_text)
        return replace(request, grammar=grammar, reading=reading)

    def _request(self, prompt: Prompt, options: Mapping[str, Any]) -> Request:
        """Prompt and options as the engine takes them. ``Request`` and ``SamplingParams`` check the values."""
        given = {name: value for name, value in options.items() if value is not None}
        stop, ignore_eos = given.pop("stop", ()), given.pop("ignore_eos", False)
        require_flag("ignore_eos", ignore_eos)
        if isinstance(given.get("logit_bias"), Mapping):
            given["logit_bias"] = tuple(given["logit_bias"].items())
        grammar = self._grammar(given.pop("grammar", None), given.pop("response_format", None), prompt)
        speculation = self._speculation(given.pop("speculation", None), given.pop("prediction", None))
        limits: dict[str, Any] = {
            name: given.pop(name) for name in ("max_tokens", "prompt_cache", "priority") if name in given
        }
        if "cache_salt" in given:
            limits["namespace"] = given.pop("cache_salt")
        return Request(
            request_id=RequestId(uuid.uuid4().hex),
            prompt_ids=prompt.ids,
            eos_ids=frozenset() if ignore_eos else self._text.tokenizer.eos_ids,
            stop=(stop,) if isinstance(stop, str) else tuple(stop) if isinstance(stop, list) else stop,
            grammar=grammar,
            boundary=prompt.boundary,
            checkpoint_positions=prompt.checkpoint_positions,
            continues_text=prompt.continues_text,
            speculation=speculation,
            sampling=self._text.defaults.sampling(**{"seed": secrets.randbits(64)} | given),
            **limits,
        )

    def _speculation(self, speculation: object, prediction: object) -> Speculation | None:
        """Who drafts; None: whoever the engine's options name."""
        wanted = None if speculation is None else read_speculation(speculation)
        if prediction is None:
            return wanted
        if not isinstance(prediction, str):
            raise mistyped("prediction", "a string", prediction)
        predicted_ids = tuple(self._text.tokenizer.encode(prediction, add_special=False))
        if not predicted_ids:
            return wanted
        # Where the answer differs, what it repeats may be in the prompt, too.
        wanted = wanted or Speculation(sources=("ngram",))
        return replace(wanted, sources=("external", *wanted.sources), predicted_ids=predicted_ids)

    def _grammar(self, grammar: object, response_format: object, prompt: Prompt) -> Grammar | None:
        """What the answer must match, compiled already: what cannot be is refused here, not by the stream."""
        from troth.text.response_format import read_response_format

        param = "grammar"
        if response_format is not None:
            if grammar is not None:
                raise RequestError("grammar and response_format both say what the answer must match", param=param)
            grammar, param = read_response_format(response_format), "response_format"
        if grammar is None:
            return None
        if not isinstance(grammar, Grammar):
            raise mistyped("grammar", "a Grammar", grammar)
        compiler = self._text.grammars(self._thread.info.vocab_size)
        compiler.compile(grammar, continues_text=prompt.continues_text, param=param)
        return grammar


def _require_names(variables: object) -> None:
    if not isinstance(variables, Mapping) or not all(isinstance(name, str) for name in variables):
        raise mistyped("template_variables", "a mapping of names to values", variables)


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
