"""The prompts on which draft heads are proved: chats where the model has a template, else plain text.

Longer than a few blocks, so that prefixes of them can be served by the prompt cache. Refuses to know what is proved
(``run/certification.py``).
"""

from __future__ import annotations

from typing import Final

from troth.errors import CapabilityUnavailable, ContextExceeded
from troth.text.prompt import PromptBuilder

_NOTES: Final = (
    "The library opens at nine and closes at six, on Saturdays at one. Books are lent for four weeks; a card costs "
    "nothing, and a lost one three coins. The reading room on the upper floor has forty desks, a lamp on each."
)
QUESTIONS: Final = (
    "Name the capital of Spain.",
    f"Here are some notes. {_NOTES}\nWhen does the library close on Saturdays, and what does a lost card cost?",
    f"Repeat this text exactly: {_NOTES}",
    "Count from one to twenty, one number a line.",
    "Write a Python function that returns the sum of the squares of a list of numbers.",
    'Extract name and age as JSON: "Maria, who is 34, lives in Lisbon with her two cats and an old piano."',
)


def certifying_prompts(prompts: PromptBuilder) -> list[tuple[int, ...]]:
    """Token ids of the questions, those that the context has no room for left out.

    Raises:
        ContextExceeded: it has room for none.
    """
    built: list[tuple[int, ...]] = []
    refused: ContextExceeded | None = None
    for question in QUESTIONS:
        try:
            built.append(_prompt(prompts, question))
        except ContextExceeded as error:
            refused = error
    if not built and refused is not None:
        raise refused
    return built


def _prompt(prompts: PromptBuilder, question: str) -> tuple[int, ...]:
    try:
        return prompts.chat([{"role": "user", "content": question}]).ids
    except CapabilityUnavailable:
        return prompts.completion(question).ids
