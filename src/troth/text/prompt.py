"""Owns the way from a chat, a text or ids to a prompt: rendered, encoded, with its BOS and its boundary.

Knows no sampling and no engine. Read next: ``messages.py``, ``chat_renderer.py``, ``tokenizer.py``.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import takewhile
from typing import Any, Final

from troth.contracts.object_cache import ObjectCache
from troth.errors import CapabilityUnavailable, ContextExceeded, RequestError
from troth.text.chat_renderer import ChatRenderer
from troth.text.chat_template import ChatTemplate
from troth.text.control_text import ControlGuard, without_marks
from troth.text.messages import normalise_messages
from troth.text.object_cache import BoundedObjects
from troth.text.token_beginnings import BEGINNING_BYTES, TokenBeginnings
from troth.text.tokenizer import Tokenizer
from troth.text.volatile_header import without_volatile_values

# Stands at the end of a message that is to be continued, so that the render can be cut there. Private-use characters:
# no template looks for them and no client has reason to send them.
_CUT: Final = "\ue0c7\ue0a9\ue0c7"


@dataclass(frozen=True, slots=True)
class Prompt:
    """What a request continues."""

    text: str
    """The rendered text; empty for a prompt given as ids."""
    ids: tuple[int, ...]
    boundary: int | None = None
    """Number of ids before the generation prompt: the conversation so far, which the next turn begins with too."""
    continues_text: bool = False
    """Whether the answer goes on in the middle of a text, so that a space at its start is part of it."""
    checkpoint_positions: tuple[int, ...] = ()
    """Numbers of ids after which other conversations may differ: the end of system prompt and tools."""


class PromptBuilder:
    """Builds prompts for one model. Safe to use from several threads."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        template: ChatRenderer | ChatTemplate | None,
        *,
        context_tokens: int,
        steady_headers: bool = True,
        objects: ObjectCache | None = None,
        hears_nobody: bool = False,
    ) -> None:
        """``template`` alone is read in the form most take; a renderer knows the model's own.

        ``hears_nobody``: whether the template was proved to leave out what a user says.

        ``objects``: where token ids of beginnings are kept; None: in a cache of its own.

        ``steady_headers``: whether values that change with each request are evened out (``volatile_header.py``).
        """
        self._tokenizer = tokenizer
        self._template = ChatRenderer(template) if isinstance(template, ChatTemplate) else template
        self._guard = ControlGuard(tokenizer.control_texts if template is not None else ())
        self._context_tokens = context_tokens
        self._steady_headers = steady_headers
        self._hears_nobody = hears_nobody
        self._beginnings = TokenBeginnings(tokenizer, objects or BoundedObjects(BEGINNING_BYTES))

    def chat(
        self,
        messages: object,
        tools: Sequence[Mapping[str, Any]] | None = None,
        variables: Mapping[str, Any] | None = None,
        continue_final: bool = False,
    ) -> Prompt:
        """The prompt of a conversation.

        Args:
            messages: As clients send them (``messages.py``).
            tools: Tool declarations for the template, None for none.
            variables: Further names for the template, such as ``enable_thinking``.
            continue_final: The last message is the assistant's and unfinished: the answer continues its text.

        Raises:
            CapabilityUnavailable: the model has no chat template, or one that leaves out what a user says.
            RequestError: messages of the wrong form, or a template that fails on them; ``param`` names the field.
            ContextExceeded: the prompt is longer than the context by a margin that shows before encoding it.
        """
        if self._template is None:
            raise CapabilityUnavailable(
                "chat", "this model has no chat template; use completions, or give a template", param="messages"
            )
        if self._hears_nobody:
            raise CapabilityUnavailable(
                "chat",
                "this model's chat template leaves out what a user says; use completions, or give another template",
                param="messages",
            )
        normal = normalise_messages(messages)
        if self._steady_headers:
            normal = without_volatile_values(normal)
        self._refuse_huge(normal)
        # What people and tools say never becomes a control id, whatever it spells.
        normal, tools = self._guarded(normal, "messages"), self._guarded(tools, "tools")
        variables = self._guarded(variables, "chat_template_kwargs")
        if continue_final:
            text = self._render_open(self._template, normal, tools, variables)
            history = normal[:-1]
        else:
            text = self._template.render(normal, tools=tools, variables=variables)
            history = normal
        prompt = self._encode(text, self._render_history(self._template, history, tools, variables))
        opening = self._render_opening(self._template, normal, tools, variables)
        num_shared = _num_common(self._encode(opening, "").ids, prompt.ids) if opening else 0
        return replace(prompt, continues_text=continue_final, checkpoint_positions=(num_shared,) if num_shared else ())

    def completion(self, text: str) -> Prompt:
        """The prompt of a plain text to be continued.

        Raises:
            RequestError: half a surrogate pair.
            ContextExceeded: longer than the context by a margin that shows before encoding it.
        """
        self._require_room([text], "prompt")
        ids = self._tokenizer.encode(text, add_special=True, param="prompt")
        return Prompt(text, tuple(ids[self._num_bos_repeated(ids) :]), continues_text=True)

    def token_ids(self, ids: Sequence[int]) -> Prompt:
        """The prompt given as ids of this model's own vocabulary, taken as they are.

        Raises:
            RequestError: no list of ids, or an id that is no integer or outside the vocabulary.
            ContextExceeded: more ids than the context has room for.
        """
        if not isinstance(ids, Sequence) or isinstance(ids, (str, bytes, bytearray)):
            raise RequestError(
                f"prompt must be text or a list of token ids, not {type(ids).__name__}",
                param="prompt",
                code="invalid_type",
            )
        if len(ids) >= self._context_tokens:
            raise ContextExceeded(num_prompt_tokens=len(ids), max_tokens=1, limit=self._context_tokens, param="prompt")
        limit = self._tokenizer.vocab_size
        for index, token_id in enumerate(ids):
            if isinstance(token_id, bool) or not isinstance(token_id, int) or not 0 <= token_id < limit:
                raise RequestError(
                    f"prompt[{index}] is {token_id!r}; this model's token ids are integers from 0 to {limit - 1}",
                    param=f"prompt[{index}]",
                )
        return Prompt("", tuple(ids), continues_text=True)

    def _guarded(self, value: Any, param: str) -> Any:
        """A part of a chat with its spellings of control tokens marked."""
        try:
            return self._guard.mark(value)
        except RecursionError:
            raise RequestError(f"{param} is nested too deeply; flatten it", param=param) from None

    def _refuse_huge(self, messages: Sequence[Mapping[str, Any]]) -> None:
        """Refuse what cannot fit before work is spent on it.

        Counts only what every template writes out: some drop past reasoning from assistant messages, and most trim.
        """
        texts = (message["content"].strip() for message in messages if message["role"] != "assistant")
        # Of a message at least its beginning is written. Rendering 200,000 empty ones would take ten seconds.
        self._require_room(texts, "messages", least=len(messages))

    def _require_room(self, texts: Iterable[str], param: str, least: int = 0) -> None:
        """Refuse texts that must come to more tokens than there are; ``least`` is what is known already.

        Short ones are not even looked at.
        """
        long = [text for text in texts if len(text) >= self._context_tokens]
        least = max(least, sum(self._tokenizer.min_num_tokens(text, param=param) for text in long))
        if least >= self._context_tokens:
            raise ContextExceeded(
                num_prompt_tokens=least, max_tokens=1, limit=self._context_tokens, at_least=True, param=param
            )

    def _render_open(
        self,
        template: ChatRenderer,
        messages: list[dict[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None,
        variables: Mapping[str, Any] | None,
    ) -> str:
        """The render up to the end of the last message's content."""
        last, place = messages[-1], f"messages[{len(messages) - 1}]"
        if last["role"] != "assistant" or "tool_calls" in last:
            raise RequestError(f"{place} cannot be continued; only an assistant message of text can", param=place)
        marked = [*messages[:-1], {**last, "content": last["content"] + _CUT}]
        text = template.render(marked, tools=tools, variables=variables, add_generation_prompt=False)
        if text.count(_CUT) != 1:
            raise CapabilityUnavailable(
                "continuing a message", f"this model's template does not write {place} as it stands", param=place
            )
        return text[: text.index(_CUT)]

    def _render_history(
        self,
        template: ChatRenderer,
        messages: list[dict[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None,
        variables: Mapping[str, Any] | None,
    ) -> str:
        """The conversation without the opening of the assistant's turn; empty when there is no such thing."""
        if not messages:
            return ""
        try:
            return template.render(messages, tools=tools, variables=variables, add_generation_prompt=False)
        except RequestError:
            return ""  # some templates refuse half a conversation; the whole one did render

    def _render_opening(
        self,
        template: ChatRenderer,
        messages: list[dict[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None,
        variables: Mapping[str, Any] | None,
    ) -> str:
        """System prompt and tools, up to what the first user would say; empty when there are neither."""
        system = list(takewhile(lambda message: message["role"] == "system", messages))
        if not system and not tools:
            return ""
        text = self._render_history(template, [*system, {"role": "user", "content": _CUT}], tools, variables)
        return text[: max(0, text.find(_CUT))]

    def _encode(self, text: str, before: str) -> Prompt:
        """Encode a rendered chat, of which ``before`` is the part without the opening of the assistant's turn."""
        tokenizer = self._tokenizer
        self._require_room([text], "messages")
        ids, boundary = self._beginnings.encode(text, len(before))
        if not before or not text.startswith(before):
            boundary = None
        elif boundary is None:
            own, _ = self._beginnings.encode(before, len(before))
            boundary = len(own) if len(own) < len(ids) and ids[: len(own)] == own else None
        bos = tokenizer.bos_id
        if tokenizer.add_bos and bos is not None and ids[:1] != [bos]:
            ids, boundary = [bos, *ids], None if boundary is None else boundary + 1
        else:
            repeated = self._num_bos_repeated(ids)
            ids, boundary = ids[repeated:], None if boundary is None else boundary - repeated
        return Prompt(without_marks(text), tuple(ids), boundary)

    def _num_bos_repeated(self, ids: Sequence[int]) -> int:
        """How many leading BOS ids are too many: a template or a text may bring one beside the model's own."""
        if not self._tokenizer.add_bos:
            return 0
        count = 0
        while ids[count : count + 2] == [self._tokenizer.bos_id] * 2:
            count += 1
        return count


def _num_common(left: Sequence[int], right: Sequence[int]) -> int:
    """How many ids two sequences begin with alike."""
    return next((n for n, (a, b) in enumerate(zip(left, right, strict=False)) if a != b), min(len(left), len(right)))
