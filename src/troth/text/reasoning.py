"""Owns how reasoning is marked: the forms, whether an answer starts inside a span, and the count of its tokens.

Knows no tool. The start state comes from the rendered prompt's end, never from a model's name. Read next:
``classifier.py`` (splits the stream), ``channels.py`` (forms that mark every part of an answer).
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from types import MappingProxyType
from typing import Final

MAX_PREFIX_CHARACTERS: Final = 64
"""White space an opening marker may have before it at the start of an answer."""
MAX_DUPLICATE_SPACE: Final = 8
"""White space a second closing marker may have before it after a forced close."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReasoningFormat:
    """One way to mark a span. The first of each is what a template writes; the others were seen."""

    name: str
    opens: tuple[str, ...]
    closes: tuple[str, ...]
    at_once: tuple[str, ...] = ()
    """Opening and closing in one: an empty span."""
    frames: tuple[str, ...] = ()
    """Markers around the answer that are not part of it."""

    @property
    def close(self) -> str:
        """The marker to force."""
        return self.closes[0]

    def starts_inside(self, prompt_tail: str) -> bool:
        """Whether the rendered prompt, of which this is the end, leaves the answer inside a span."""
        return prompt_tail.rstrip().endswith(tuple(mark.rstrip() for mark in self.opens))


_ALL: Final = (
    ReasoningFormat(name="think", opens=("<think>",), closes=("</think>",)),
    ReasoningFormat(name="thinking", opens=("<thinking>",), closes=("</thinking>",)),
    ReasoningFormat(name="reasoning", opens=("<reasoning>",), closes=("</reasoning>",)),
    ReasoningFormat(name="thought", opens=("<thought>",), closes=("</thought>",)),
    ReasoningFormat(
        name="gemma4",
        opens=("<|channel>thought\n", "<|channel>"),
        closes=("<channel|>",),
        at_once=("<|channel>thought<channel|>",),
    ),
    ReasoningFormat(name="mistral", opens=("[THINK]",), closes=("[/THINK]",)),
    ReasoningFormat(
        name="hunyuan",
        opens=("<think:opensource>", "<think>"),
        closes=("</think:opensource>", "</think>"),
    ),
    ReasoningFormat(name="hunyuan_answer", opens=("<think>",), closes=("</think>",), frames=("<answer>", "</answer>")),
    ReasoningFormat(name="seed", opens=("<seed:think>",), closes=("</seed:think>",)),
    ReasoningFormat(name="minimax3", opens=("<mm:think>",), closes=("</mm:think>",)),
    ReasoningFormat(name="cohere", opens=("<|START_THINKING|>",), closes=("<|END_THINKING|>",)),
    ReasoningFormat(
        name="kimi3",
        opens=("<|open|>think<|sep|>",),
        closes=("<|close|>think<|sep|>", "<|open|>response<|sep|>"),
    ),
    ReasoningFormat(
        name="solar",
        opens=("<|think|>",),
        closes=("<|end|>",),
        frames=("<|begin|>assistant", "<|begin|>assistant<|content|>", "<|content|>", "<|end|>"),
    ),
    ReasoningFormat(name="minicpm3", opens=("<|thought_start|>",), closes=("<|thought_end|>",)),
    ReasoningFormat(name="apriel", opens=("Here are my reasoning steps:\n",), closes=("[BEGIN FINAL RESPONSE]",)),
    ReasoningFormat(name="apertus", opens=("<|inner_prefix|>",), closes=("<|inner_suffix|>",)),
)

REASONING_FORMATS: Final = MappingProxyType({item.name: item for item in _ALL})
"""Every form by its name."""


class TokenMeter:
    """Counts the tokens whose text became reasoning, markers not counted.

    Text is classified later than it arrives, so tokens wait here by the place where their text ends.
    """

    def __init__(self) -> None:
        self.num_tokens = 0
        self._spans: deque[tuple[int, int]] = deque()
        self._oldest_counted = False
        self._num_arrived = 0
        self._num_classified = 0

    @property
    def num_waiting(self) -> int:
        """Tokens whose text is not classified to its end."""
        return len(self._spans)

    @property
    def num_unclassified(self) -> int:
        """Characters that have arrived and are not classified."""
        return self._num_arrived - self._num_classified

    def arrived(self, num_characters: int) -> None:
        """A token came with this much text; one without any belongs to the character that follows."""
        self._spans.append((self._num_arrived, self._num_arrived + max(num_characters, 1)))
        self._num_arrived += num_characters

    def classified(self, num_characters: int, is_reasoning: bool) -> None:
        """The next characters of the text are, or are not, reasoning."""
        self._num_classified += num_characters
        while self._spans and self._spans[0][0] < self._num_classified:
            if is_reasoning and not self._oldest_counted:
                self.num_tokens += 1
                self._oldest_counted = True
            if self._spans[0][1] > self._num_classified:
                break
            self._spans.popleft()
            self._oldest_counted = False
