"""Header lines with a value that changes in every request: prompts begin alike, and nothing else changes."""

from __future__ import annotations

from typing import Any

import pytest

from tests.portable.vocabularies import byte_level
from troth.text.chat_template import ChatTemplate
from troth.text.prompt import PromptBuilder
from troth.text.volatile_header import without_volatile_values

BILLING = "x-anthropic-billing-header: cc_version=2.1.0; cc_entrypoint=cli; cch={};"
TEMPLATE = "{% for m in messages %}<{{ m.role }}>{{ m.content }}\\n{% endfor %}<assistant>"


def conversation(system: str, role: str = "system") -> list[dict[str, Any]]:
    return [{"role": role, "content": system}, {"role": "user", "content": "What is cch=9?"}]


@pytest.mark.parametrize("role", ["system", "developer"])
@pytest.mark.parametrize("before", ["", "Hello.\n", "\n\n  "])
def test_volatile_header_values_become_equal(role: str, before: str) -> None:
    one, other = (
        without_volatile_values(conversation(f"{before}{BILLING.format(value)}\nYou are kind.", role))
        for value in ("0f3a1", "9")
    )
    assert one == other
    assert one[0]["content"] == f"{before}{BILLING.format(0)}\nYou are kind."
    assert one[1] == conversation("")[1]


@pytest.mark.parametrize(
    "messages",
    [
        conversation("You are kind. cch=0f3a1; is what they send."),
        conversation("\n".join(["text"] * 4 + [BILLING.format("0f3a1")])),
        conversation(BILLING.format("0f3a1"), role="user"),
        conversation("x-anthropic-billing-header: cc_version=2.1.0;"),
        conversation(""),
    ],
)
def test_volatile_header_leaves_everything_else_as_it_is(messages: list[dict[str, Any]]) -> None:
    assert without_volatile_values(messages) == messages


def test_volatile_header_does_not_change_what_it_is_given() -> None:
    messages = conversation(BILLING.format("0f3a1"))
    without_volatile_values(messages)
    assert messages == conversation(BILLING.format("0f3a1"))


@pytest.mark.parametrize("steady", [True, False])
def test_prompts_of_a_client_with_a_volatile_header_begin_alike(steady: bool) -> None:
    tokenizer = byte_level(template=TEMPLATE)
    builder = PromptBuilder(
        tokenizer,
        ChatTemplate(TEMPLATE, bos_token=tokenizer.bos_token, eos_token=tokenizer.eos_token),
        context_tokens=4096,
        steady_headers=steady,
    )
    prompts = [builder.chat(conversation(f"{BILLING.format(value)}\nYou are kind.")) for value in ("0f3a1", "7c2e9")]
    assert (prompts[0].ids == prompts[1].ids) == steady
    assert ("cch=0;" in prompts[0].text) == steady
