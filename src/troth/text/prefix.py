"""What every conversation begins with that goes on from some messages: tokens worth computing before anybody asks.

Refuses to know how they are kept (``schedule/pins.py``) and who asks (``serve/prefixes.py``, ``request_builder.py``).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from hashlib import sha256
from typing import Any, Final, Protocol

from troth.contracts.names import RequestId
from troth.contracts.request import Request
from troth.contracts.sampling import SamplingParams
from troth.errors import RequestError

_FIRST_WORDS: Final = ("x", "7")
"""What two users might begin with; up to where their conversations agree is what all begin with."""


class ChatPrompt(Protocol):
    """As ``prompt.py`` builds them."""

    @property
    def ids(self) -> Sequence[int]:
        """Token ids."""

    @property
    def boundary(self) -> int | None:
        """Tokens before the generation prompt."""

    @property
    def checkpoint_positions(self) -> tuple[int, ...]:
        """Numbers of tokens after which other conversations may differ."""


class ChatPrompts(Protocol):
    """Builds prompts; ``PromptBuilder`` is one."""

    def chat(
        self,
        messages: Sequence[Any],
        tools: Sequence[Mapping[str, Any]] | None = None,
        variables: Mapping[str, Any] | None = None,
    ) -> ChatPrompt:
        """Check and render a conversation."""


@dataclass(frozen=True, slots=True)
class PrefixIds:
    """A prefix as token ids."""

    ids: tuple[int, ...]
    """At least one."""
    ends: tuple[int, ...] = ()
    """Numbers of them after which other conversations may differ."""

    def __post_init__(self) -> None:
        """Raises RequestError: there are none."""
        if not self.ids:
            raise RequestError("the prefix has no tokens: nothing is common to all prompts that begin like it")

    def request(self, request_id: RequestId, name: str | None, namespace: str = "") -> Request:
        """What computes and pins it: a request for one token.

        Args:
            request_id: of the request.
            name: of the pin; None or empty: named after the tokens.
            namespace: only requests with the same one share it.
        """
        return Request(
            request_id=request_id,
            prompt_ids=self.ids,
            max_tokens=1,
            boundary=len(self.ids),
            checkpoint_positions=self.ends,
            namespace=namespace,
            pin=name or f"prefix-{sha256(str(self.ids).encode()).hexdigest()[:16]}",
            sampling=SamplingParams(temperature=0.0),
        )


def chat_prefix(
    prompts: ChatPrompts,
    messages: Sequence[Any],
    tools: Sequence[Mapping[str, Any]] | None,
    variables: Mapping[str, Any] | None,
) -> PrefixIds:
    """The tokens of a conversation without the opening of the next answer; of system prompts alone those before the
    first user's words.

    Raises:
        RequestError: the template refuses the messages, or they have nothing in common with what comes after them.
    """
    if not all(isinstance(message, Mapping) and message.get("role") in ("system", "developer") for message in messages):
        prompt = prompts.chat(messages, tools, variables)
        return PrefixIds(tuple(prompt.ids[: prompt.boundary]), tuple(prompt.checkpoint_positions))
    # Many templates refuse a conversation in which nobody has asked anything yet.
    one, other = (
        prompts.chat([*messages, {"role": "user", "content": words}], tools, variables).ids for words in _FIRST_WORDS
    )
    return PrefixIds(tuple(one[: next((at for at, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), 0)]))
