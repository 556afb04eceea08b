"""How a request's answer is to be read: the marks its model makes, the tools it may call, how long it may reason.

Names and ids alone; what a name stands for, and what becomes of the text, is for ``text/classifier.py`` to say.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final, Literal

from troth.contracts.bounds import INT64, mistyped, require_integer
from troth.contracts.tools import CallForm, ToolPolicy
from troth.errors import RequestError

ContinuedKind = Literal["text", "reasoning"]
"""What of an unfinished answer the prompt ends in."""

MAX_CLOSE_TOKENS: Final = 64
"""A mark is a few tokens, and each is forced on top of ``max_tokens``."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AnswerReading:
    """What splits one answer into text, reasoning and calls. Everything left out: all of it is text.

    Raises:
        RequestError: a value that no engine could use; ``param`` names it. Names are looked up by the engine.
    """

    reasoning: str | None = None
    """Name of the marks around reasoning."""
    tools: str | None = None
    """Name of the wire format of calls."""
    call_form: CallForm | None = None
    """The format itself, where no module describes it."""
    policy: ToolPolicy = field(default_factory=ToolPolicy)
    """The tools that may be called, and how strictly."""
    prompt_tail: str = ""
    """The end of the rendered prompt, which says whether the answer begins inside its reasoning."""
    continues: ContinuedKind | None = None
    """The prompt ends inside an answer that this one carries on; None: the answer begins here."""
    reasoning_budget: int | None = None
    """Tokens that reasoning may have before it is closed by force; None: any number."""
    close_ids: tuple[int, ...] = ()
    """Token ids of the mark that closes reasoning, for when the budget is used up or its end is asked for; none: it is
    never forced."""

    def __post_init__(self) -> None:
        if self.reasoning_budget is not None:
            require_integer("reasoning_budget", self.reasoning_budget, 0, INT64)
        if not isinstance(self.policy, ToolPolicy):
            raise mistyped("tools", "a ToolPolicy", self.policy)
        if len(self.close_ids) > MAX_CLOSE_TOKENS:
            raise RequestError(
                f"the mark that closes reasoning has {len(self.close_ids)} tokens; {MAX_CLOSE_TOKENS} are allowed",
                param="close_ids",
            )

    @property
    def num_forced_tokens(self) -> int:
        """Most tokens that the answer will get on top of its ``max_tokens`` without anybody asking."""
        return 0 if self.reasoning_budget is None else len(self.close_ids)
