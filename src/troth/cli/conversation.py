"""What was said in one chat, as the messages that the next answer is given.

Refuses to know models and terminals. Read next: ``chat.py``.
"""

from __future__ import annotations


class Conversation:
    """A system message, if any, and turns of user and assistant in alternation."""

    def __init__(self, system: str | None = None) -> None:
        self.system = system
        self._turns: list[tuple[str, str, str]] = []

    def __len__(self) -> int:
        """Turns so far."""
        return len(self._turns)

    def asking(self, question: str) -> list[dict[str, str]]:
        """The messages of a request for the answer to ``question``. Nothing is remembered yet."""
        messages = [] if self.system is None else [{"role": "system", "content": self.system}]
        for asked, answered, thought in self._turns:
            # How much of old reasoning the next prompt holds is for the template to say.
            reasoning = {"reasoning_content": thought} if thought else {}
            messages += [{"role": "user", "content": asked}, {"role": "assistant", "content": answered, **reasoning}]
        return [*messages, {"role": "user", "content": question}]

    def add(self, question: str, answer: str, reasoning: str = "") -> None:
        """Remember a turn."""
        self._turns.append((question, answer, reasoning))

    def undo(self) -> bool:
        """Forget the last turn; whether there was one."""
        return bool(self._turns and self._turns.pop())

    def clear(self) -> None:
        """Forget every turn; the system message stays."""
        self._turns.clear()
