"""The chats of troth-tiny-hybrid, a small trained model that thinks and calls tools, and what is right for each."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from functools import cache
from typing import Any, Final

from tests.e2e.demo_server import NAME
from tests.shared_data import shared

MODEL: Final = "troth-tiny-hybrid"


@cache
def chats() -> tuple[dict[str, Any], ...]:
    """All rows; skips the test where they are absent."""
    return tuple(map(json.loads, shared(f"{MODEL}/chats.jsonl").read_text().splitlines()))


@dataclass(slots=True)
class Said:
    """An answer, whole or put together from its stream. Ids of calls are their own affair."""

    content: str = ""
    reasoning: str = ""
    calls: list[tuple[str, str]] = field(default_factory=list)
    ids: list[str] = field(default_factory=list, compare=False)
    finish_reason: str | None = None

    def matches(self, row: dict[str, Any]) -> bool:
        """Whether it is what the row expects, to the letter; arguments as JSON."""
        expected = row["expected"]
        reasoning = expected.get("reasoning_content", "") if row["enable_thinking"] else ""
        calls = [(call["function"]["name"], call["function"]["arguments"]) for call in expected.get("tool_calls", [])]
        said = [(name, json.loads(arguments)) for name, arguments in self.calls]
        finish = "tool_calls" if calls else "stop"
        return (self.content, self.reasoning, said, self.finish_reason) == (
            expected["content"],
            reasoning,
            calls,
            finish,
        )


def fields(row: dict[str, Any], **others: Any) -> dict[str, Any]:
    """The body that asks a row's question."""
    tools = {"tools": row["tools"]} if row["tools"] else {}
    extra = {"extra_body": {"enable_thinking": row["enable_thinking"], **others.pop("extra_body", {})}}
    limits = {"temperature": 0, "max_tokens": 400}
    return {"model": NAME, "messages": row["messages"], **limits, **tools, **extra, **others}


def whole(client: Any, row: dict[str, Any], **others: Any) -> Said:
    """The answer in one piece."""
    choice = client.chat.completions.create(**fields(row, **others)).choices[0]
    calls = choice.message.tool_calls or []
    return Said(
        choice.message.content or "",
        getattr(choice.message, "reasoning_content", None) or "",
        [(call.function.name, call.function.arguments) for call in calls],
        [call.id for call in calls],
        choice.finish_reason,
    )


def streamed(client: Any, row: dict[str, Any], **others: Any) -> Said:
    """The answer put together from its deltas, as clients do it."""
    said = Said()
    calls: dict[int, list[str]] = {}
    for chunk in client.chat.completions.create(**fields(row, stream=True, **others)):
        for choice in chunk.choices:
            said.content += choice.delta.content or ""
            said.reasoning += getattr(choice.delta, "reasoning_content", None) or ""
            said.finish_reason = choice.finish_reason or said.finish_reason
            for delta in choice.delta.tool_calls or []:
                if delta.index not in calls:
                    assert (delta.type, bool(delta.id), bool(delta.function.name)) == ("function", True, True)
                    said.ids.append(delta.id)
                    calls[delta.index] = [delta.function.name, ""]
                else:
                    assert (delta.id, delta.function.name) == (None, None)
                calls[delta.index][1] += delta.function.arguments or ""
    said.calls = [(name, arguments) for name, arguments in calls.values()]
    return said
