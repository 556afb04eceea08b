"""Conversations of five turns through published templates: a turn costs its new tokens, whatever the template drops.

Prompts come from the real templates, boundaries included; answers are scripted. What a model of full attention must be
served follows from the tokens alone; what one with recurrent layers must be, from the places others come back to.
"""

from __future__ import annotations

import gzip
import json
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import pytest

from tests.portable.test_scheduler import FULL, limits
from tests.portable.vocabularies import byte_level
from tests.shared_data import shared
from troth.contracts.cache_spec import AttentionSpec
from troth.contracts.names import BLOCK_TOKENS, RequestId
from troth.contracts.plan import NO_SAMPLE, StepResult
from troth.contracts.request import Request
from troth.schedule import invariants
from troth.schedule.scheduler import Scheduler
from troth.text.chat_template import ChatTemplate
from troth.text.prompt import Prompt, PromptBuilder
from troth.text.tokenizer import Tokenizer
from troth.text.tokenizer_json import tokenizer_from_json

SLIDING = AttentionSpec(layers=(1,), num_kv_heads=1, head_dim=8, value_dim=8, element_bytes=4, window=100)
SYSTEM = "You answer in one sentence. " + "Be precise, kind and brief, and never guess. " * 12
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "weather",
            "description": "The weather of a place.",
            "parameters": {"type": "object", "properties": {"place": {"type": "string"}}, "required": ["place"]},
        },
    }
]
TURNS = [
    (
        "What is the capital of France?",
        "They want the capital of France, which is Paris.",
        "It is Paris, on the Seine.",
    ),
    ("And that of Italy?", "Now Italy: that is Rome, surely.", "That is Rome, which is older than most."),
    ("Which of them is larger?", "Paris has two million people, Rome almost three.", "Rome is the larger one."),
    ("Since when?", "Rome overtook the city of Paris long ago.", "For many decades now, if suburbs do not count."),
    ("Thank you!", "Nothing to look up here.", "You are welcome, ask again any time."),
]


@cache
def published(name: str) -> Tokenizer:
    folder = shared(f"tokenizers/{name}")
    config = json.loads((folder / "tokenizer_config.json").read_text())
    return tokenizer_from_json(gzip.decompress((folder / "tokenizer.json.gz").read_bytes()), names=config)


@cache
def hybrid() -> Tokenizer:
    return Tokenizer.from_folder(shared("troth-tiny-hybrid"))


@cache
def with_turns() -> Tokenizer:
    marks = [{"content": text, "special": True} for text in ("<start_of_turn>", "<end_of_turn>")]
    return byte_level(bos=True, added=marks)


@dataclass(frozen=True)
class Family:
    """A published template, a tokenizer that knows its control tokens, and what ends a turn."""

    template: str
    tokenizer: Callable[[], Tokenizer]
    end: str
    variables: dict[str, Any] = field(default_factory=dict)
    tools: bool = False

    def builder(self) -> PromptBuilder:
        tokenizer = self.tokenizer()
        source = shared(self.template).read_text(encoding="utf-8")
        template = ChatTemplate(source, bos_token=tokenizer.bos_token, eos_token=tokenizer.eos_token)
        return PromptBuilder(tokenizer, template, context_tokens=100_000)


QWEN = "templates/qwen/llamacpp__Qwen-Qwen3-0.6B.jinja"
FAMILIES = {
    "qwen3 thinking": Family(QWEN, lambda: published("qwen3"), "<|im_end|>", {"enable_thinking": True}),
    "qwen3 not thinking": Family(QWEN, lambda: published("qwen3"), "<|im_end|>", {"enable_thinking": False}),
    "qwen3 with tools": Family(QWEN, lambda: published("qwen3"), "<|im_end|>", tools=True),
    "hermes": Family(
        "templates/hermes/vllm__tool_chat_template_hermes.jinja", lambda: published("qwen3"), "<|im_end|>", tools=True
    ),
    "llama 3.1": Family("templates/llama/npm-lenml__llama3_1.jinja", lambda: published("llama3_1"), "<|eot_id|>"),
    "gemma": Family("templates/gemma/llamacpp__google-gemma-2-2b-it.jinja", with_turns, "<end_of_turn>"),
    "hybrid thinking": Family("troth-tiny-hybrid/chat_template.jinja", hybrid, "<|im_end|>", {"enable_thinking": True}),
    "hybrid not thinking": Family(
        "troth-tiny-hybrid/chat_template.jinja", hybrid, "<|im_end|>", {"enable_thinking": False}
    ),
}


class Server:
    """A scheduler that answers what it is told to, and remembers what it has seen."""

    def __init__(self, *, recurrent: bool = False, sliding: bool = False) -> None:
        groups = (FULL, SLIDING) if sliding else (FULL,)
        self.scheduler = Scheduler(
            limits(
                groups=groups,
                num_blocks=(2000,) * len(groups),
                context_tokens=20_000,
                prompt_cache=True,
                num_checkpoints=64 if recurrent else None,
                checkpoint_interval_tokens=16_000,
            )
        )
        self.lineages: list[tuple[list[int], Prompt]] = []
        """(tokens whose state was computed, the prompt they began with)."""

    def ask(self, prompt: Prompt, answer: list[int]) -> int:
        """Serve a prompt; how many of its tokens were cached."""
        request = Request(
            request_id=RequestId(str(len(self.lineages))),
            prompt_ids=prompt.ids,
            max_tokens=len(answer) + 1,
            eos_ids=frozenset(answer[-1:]),
            boundary=prompt.boundary,
            checkpoint_positions=prompt.checkpoint_positions,
        )
        self.scheduler.add(request)
        cached = -1
        while plan := self.scheduler.plan(0.0):
            for admission in plan.admissions:
                cached = admission.num_cached_tokens
            tokens = [[answer[step]] if step != NO_SAMPLE else [] for step in plan.sample_steps]
            self.scheduler.commit(StepResult(plan.step_id, tokens))
        invariants.check(self.scheduler)
        self.lineages.append(([*prompt.ids, *answer[:-1]], prompt))
        return cached


def agreeing(left: list[int], right: list[int]) -> int:
    return next((n for n, (a, b) in enumerate(zip(left, right, strict=False)) if a != b), min(len(left), len(right)))


def whole(num_tokens: int) -> int:
    return num_tokens // BLOCK_TOKENS * BLOCK_TOKENS


def by_tokens(server: Server, prompt: Prompt) -> int:
    """What attention to everything must serve: the whole blocks that agree with anything it has seen."""
    ids = list(prompt.ids)
    return max((whole(min(agreeing(seen, ids), len(ids) - 1)) for seen, _ in server.lineages), default=0)


def by_ends(server: Server, prompt: Prompt) -> int:
    """What recurrent layers must serve: the last end of a system prompt, turn or answer that agrees."""
    ids, best = list(prompt.ids), 0
    for seen, earlier in server.lineages:
        common = min(agreeing(seen, ids), len(ids) - 1)
        assert earlier.boundary is not None
        ends = (*earlier.checkpoint_positions, earlier.boundary, len(seen))
        best = max([best, *(whole(end) for end in ends if whole(end) <= common)])
    return best


class Conversation:
    """One conversation with a server, through a family's template."""

    def __init__(self, family: Family, server: Server, *, keeps_reasoning: bool, system: str = SYSTEM) -> None:
        self.family = family
        self.build = family.builder()
        self.server = server
        self.keeps_reasoning = keeps_reasoning
        self.messages: list[dict[str, str]] = []
        if "gemma" not in family.template:
            self.messages.append({"role": "system", "content": system})

    def prompt(self, question: str) -> Prompt:
        asked = [*self.messages, {"role": "user", "content": question}]
        return self.build.chat(asked, TOOLS if self.family.tools else None, self.family.variables)

    def turn(self, question: str, reasoning: str, content: str) -> tuple[Prompt, int]:
        prompt = self.prompt(question)
        text = content
        if self.family.variables.get("enable_thinking"):
            text = f"{reasoning}\n</think>\n\n{content}"
            if not prompt.text.endswith("<think>\n"):
                text = f"<think>\n{text}"
        answer = self.family.tokenizer().encode(text + self.family.end, add_special=False)
        cached = self.server.ask(prompt, answer)
        self.messages.append({"role": "user", "content": question})
        said = {"role": "assistant", "content": content}
        self.messages.append(said | {"reasoning_content": reasoning} if self.keeps_reasoning else said)
        return prompt, cached


@pytest.mark.parametrize("keeps_reasoning", [True, False], ids=["client keeps reasoning", "client drops reasoning"])
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("topology", ["full", "sliding", "recurrent"])
def test_prompt_cache_turns_cost_their_new_tokens(topology: str, family: str, keeps_reasoning: bool) -> None:
    server = Server(recurrent=topology == "recurrent", sliding=topology == "sliding")
    expected = by_ends if topology == "recurrent" else by_tokens
    talk = Conversation(FAMILIES[family], server, keeps_reasoning=keeps_reasoning)
    previous: Prompt | None = None
    for number, (question, reasoning, content) in enumerate(TURNS):
        wanted = expected(server, talk.prompt(question))
        prompt, cached = talk.turn(question, reasoning, content)
        assert cached == wanted, f"turn {number + 1}"
        assert prompt.boundary is not None
        if previous is not None:
            assert previous.boundary is not None
            # The next turn begins with the conversation so far: a boundary that did not agree would be none.
            assert agreeing(list(previous.ids), list(prompt.ids)) >= previous.boundary
            assert cached > previous.boundary - BLOCK_TOKENS
        previous = prompt


@pytest.mark.parametrize("family", ["qwen3 thinking", "llama 3.1", "hybrid not thinking"])
@pytest.mark.parametrize("topology", ["full", "sliding", "recurrent"])
def test_prompt_cache_turns_of_4000_tokens_compute_what_is_new_and_a_block(topology: str, family: str) -> None:
    """What a recurrent state was not saved in the middle of is the rest of a block more."""
    server = Server(recurrent=topology == "recurrent", sliding=topology == "sliding")
    words = " ".join(f"Rule {number}: be brief, kind and precise." for number in range(400))
    talk = Conversation(FAMILIES[family], server, keeps_reasoning=True, system=words)
    spare = 2 * BLOCK_TOKENS if topology == "recurrent" else BLOCK_TOKENS
    for number, turn in enumerate(TURNS):
        prompt = talk.prompt(turn[0])
        agree = max((agreeing(seen, list(prompt.ids)) for seen, _ in server.lineages), default=0)
        _, cached = talk.turn(*turn)
        num_new = len(prompt.ids) - agree
        assert len(prompt.ids) > 4000
        assert number == 0 or num_new < 100, "the conversation does not go on where it was"
        assert len(prompt.ids) - cached < num_new + spare, f"turn {number + 1}"


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("topology", ["full", "sliding", "recurrent"])
def test_prompt_cache_serves_retries_edits_and_branches(topology: str, family: str) -> None:
    server = Server(recurrent=topology == "recurrent", sliding=topology == "sliding")
    expected = by_ends if topology == "recurrent" else by_tokens
    talk = Conversation(FAMILIES[family], server, keeps_reasoning=True)
    for turn in TURNS[:3]:
        talk.turn(*turn)
    before = list(talk.messages)

    def ask(question: str) -> int:
        wanted = expected(server, talk.prompt(question))
        prompt, cached = talk.turn(question, "Let me think about it anew.", "Quite so, in other words.")
        assert cached == wanted
        assert cached > 0
        assert prompt.boundary is not None
        return prompt.boundary - cached

    talk.messages = before[:-2]  # the last question asked again, for another answer
    assert ask(TURNS[2][0]) < 2 * BLOCK_TOKENS
    talk.messages = before[:-4]  # the second question, edited
    ask("And the capital of Spain?")
    talk.messages = list(before)  # and back to where the conversation was
    assert ask("Which of them is older?") < 8 * BLOCK_TOKENS


def test_prompt_cache_shares_a_system_prompt_between_conversations() -> None:
    for topology in ("full", "recurrent"):
        server = Server(recurrent=topology == "recurrent")
        for number in range(3):
            talk = Conversation(FAMILIES["hybrid thinking"], server, keeps_reasoning=True)
            prompt, cached = talk.turn(f"Question {number}, of its own?", "Well.", "Indeed.")
            (end,) = prompt.checkpoint_positions
            assert cached == (whole(end) if number else 0)


def test_prompt_cache_keeps_one_copy_of_what_32_conversations_begin_with() -> None:
    for topology in ("full", "sliding", "recurrent"):
        server = Server(recurrent=topology == "recurrent", sliding=topology == "sliding")
        words = " ".join(f"Rule {number}: be brief, kind and precise." for number in range(200))
        for number in range(32):
            talk = Conversation(FAMILIES["llama 3.1"], server, keeps_reasoning=True, system=words)
            prompt, cached = talk.turn(f"Question {number} of its own?", "", "Indeed.")
            (end,) = prompt.checkpoint_positions
            assert end > 2000
            assert number == 0 or cached >= whole(end)
        different: dict[tuple[int, ...], int] = {}  # (the block before, its tokens) -> its number
        for seen, _ in server.lineages:
            before = -1
            for at in range(0, whole(len(seen)), BLOCK_TOKENS):
                before = different.setdefault((before, *seen[at : at + BLOCK_TOKENS]), len(different))
        index = server.scheduler.prefix_index
        assert index is not None
        assert index.status().num_blocks[0] <= len(different) < whole(end) // BLOCK_TOKENS + 32 * 4


def test_prompt_names_the_end_of_system_prompt_and_tools() -> None:
    for name, family in FAMILIES.items():
        prompt = Conversation(family, Server(), keeps_reasoning=True).prompt("Hello there")
        if name == "gemma":
            assert prompt.checkpoint_positions == ()
            continue
        (end,) = prompt.checkpoint_positions
        tokenizer = family.tokenizer()
        shown = tokenizer.decode(prompt.ids[:end], skip_special=False)
        assert "never guess." in shown, name
        assert "Hello" not in shown, name
        assert ('"weather"' in shown) == family.tools, name
