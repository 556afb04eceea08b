"""What a Python caller hands over, as requests: messages or a prompt, and options by name; checked and compiled here.

What is wrong with them is said before anything is queued. Refuses to know engines and streams (``library.py``); over
HTTP ``serve/`` does the same with bodies. Next: ``text/prompt.py``, ``text/chat_terms.py``.
"""

from __future__ import annotations

import secrets
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from troth.contracts.bounds import mistyped, require_flag
from troth.contracts.grammar import Grammar
from troth.contracts.names import RequestId
from troth.contracts.request import Request
from troth.contracts.speculation import Speculation, read_speculation
from troth.errors import CapabilityUnavailable, RequestError
from troth.text.chat_terms import TERMS, ChatModel, ChatTerms, read_terms
from troth.text.messages import normalise_messages, split_continued
from troth.text.prefix import PrefixIds, chat_prefix
from troth.text.response_format import read_response_format

if TYPE_CHECKING:
    from troth.compose import TextSide
    from troth.text.prompt import Prompt

Messages = str | Sequence[Mapping[str, Any]]
"""A conversation, or one user message."""


class RequestBuilder:
    """Builds requests for one engine. Thread-safe; every method raises RequestError, naming what it cannot use.

    Args:
        text: of the model.
        context_tokens: the longest prompt plus answer.
        vocab_size: of the model's logits.
    """

    def __init__(self, text: TextSide, context_tokens: int, vocab_size: int) -> None:
        self._text = text
        self._prompts = text.prompts(context_tokens)
        self._vocab_size = vocab_size

    def chat(
        self, messages: Messages, template_variables: Mapping[str, Any] | None, options: Mapping[str, Any]
    ) -> Request:
        """A conversation to be answered, or its last message to be continued; as ``library.Engine.stream`` takes it."""
        conversation = _conversation(messages)
        terms, variables = self._terms(template_variables, options)
        shown, continues = split_continued(conversation)
        prompt = self._prompts.chat(shown, terms.shown_tools, variables=variables or None, continue_final=continues)
        rest = {name: value for name, value in options.items() if name not in TERMS}
        return self._on_terms(self._request(prompt, rest), prompt, terms)

    def completion(self, prompt: str | Sequence[int], options: Mapping[str, Any]) -> Request:
        """A text, or token ids, to be continued without a template."""
        return self._request(self._prompt(prompt), options)

    def prefix(
        self,
        messages: Messages | None,
        prompt: str | Sequence[int] | None,
        name: str | None,
        template_variables: Mapping[str, Any] | None,
        options: Mapping[str, Any],
    ) -> Request:
        """A prefix to be computed and pinned; as ``library.Engine.warm`` takes it."""
        found, salt = self._prefix(messages, prompt, template_variables, options), options.get("cache_salt")
        return found.request(RequestId(uuid.uuid4().hex), name, "" if salt is None else salt)

    def _prefix(
        self,
        messages: Messages | None,
        prompt: str | Sequence[int] | None,
        template_variables: Mapping[str, Any] | None,
        options: Mapping[str, Any],
    ) -> PrefixIds:
        unknown = next((name for name in options if name not in (*TERMS, "cache_salt")), None)
        if unknown is not None:
            raise RequestError(f"{unknown!r} changes no prefix; leave it out", param=unknown)
        if prompt is not None and messages is None:
            return PrefixIds(tuple(self._prompt(prompt).ids))
        if messages is None or prompt is not None:
            raise RequestError("a prefix is made of messages or of a prompt; give one of them", param="messages")
        conversation = _conversation(messages)
        terms, variables = self._terms(template_variables, options)
        return chat_prefix(self._prompts, normalise_messages(conversation), terms.shown_tools, variables or None)

    def _terms(
        self, template_variables: Mapping[str, Any] | None, options: Mapping[str, Any]
    ) -> tuple[ChatTerms, dict[str, Any]]:
        """What is asked of a chat beside its messages, and what the template is told of it."""
        if template_variables is not None:
            _require_names(template_variables)
        terms, capabilities = read_terms(options), self._text.capabilities
        terms.require_served(capabilities)
        if (field := terms.untaken_effort(capabilities)) is not None:
            raise CapabilityUnavailable(field, "this model's template takes none; leave it out", param=field)
        return terms, terms.variables(capabilities) | dict(template_variables or {})

    def _prompt(self, prompt: str | Sequence[int]) -> Prompt:
        return self._prompts.completion(prompt) if isinstance(prompt, str) else self._prompts.token_ids(prompt)

    def _on_terms(self, request: Request, prompt: Prompt, terms: ChatTerms) -> Request:
        """The request of a chat: how its answer is read, and the calls it must make."""
        model = ChatModel(self._text.capabilities, self._text.tokenizer, self._text.calls)
        grammar = terms.bound(request.grammar, model, prompt.text, param="grammar")
        if grammar is not None and grammar != request.grammar:
            field = "grammar" if request.grammar is not None else terms.grammar_field
            self._text.grammars(self._vocab_size).compile(grammar, param=field)
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
        param = "grammar"
        if response_format is not None:
            if grammar is not None:
                raise RequestError("grammar and response_format both say what the answer must match", param=param)
            grammar, param = read_response_format(response_format), "response_format"
        if grammar is None:
            return None
        if not isinstance(grammar, Grammar):
            raise mistyped("grammar", "a Grammar", grammar)
        compiler = self._text.grammars(self._vocab_size)
        compiler.compile(grammar, continues_text=prompt.continues_text, param=param)
        return grammar


def _conversation(messages: Messages) -> Sequence[Mapping[str, Any]]:
    return [{"role": "user", "content": messages}] if isinstance(messages, str) else messages


def _require_names(variables: object) -> None:
    if not isinstance(variables, Mapping) or not all(isinstance(name, str) for name in variables):
        raise mistyped("template_variables", "a mapping of names to values", variables)
