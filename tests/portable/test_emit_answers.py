"""Answers that are more than text: what the emitter hands on of tokens, however they come, and how it ends them."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from troth.contracts.answer import AnswerReading
from troth.contracts.events import FinishReason, Segment
from troth.contracts.names import RequestId
from troth.contracts.request import Request
from troth.contracts.sampling import SamplingParams
from troth.contracts.tools import CallForm, ToolCall, ToolCallDelta, ToolError, ToolPolicy, ToolSpec
from troth.errors import RequestError
from troth.run.emit import Emission, Emitter
from troth.testing.byte_tokenizer import EOS_ID, ByteTokenizer

CALL = '<tool_call>\n{"name": "f", "arguments": {"a": 1}}\n</tool_call>'
BROKEN = '<tool_call>\n{"name": "f", "arguments": {"a": "x"}}\n</tool_call>'
TOOL = ToolSpec(name="f", parameters={"type": "object", "properties": {"a": {"type": "integer"}}})
CLOSE = tuple(b"</think>")
MARK = 257


class MarkTokenizer(ByteTokenizer):
    """Bytes, and one control token that stands for a mark."""

    def __init__(self, text: str) -> None:
        self._text = text.encode()

    def token_bytes(self, token_id: int) -> bytes:
        return self._text if token_id == MARK else super().token_bytes(token_id)

    def shown_bytes(self, token_id: int, skip_special: bool) -> bytes:
        return b"" if skip_special and self.is_special(token_id) else self.token_bytes(token_id)


def request(stop: tuple[str, ...] = (), logprobs: int | None = None, **reading: Any) -> Request:
    policy = ToolPolicy(tools=(TOOL,), parallel=reading.pop("parallel", True))
    marks = {"reasoning": "think", "tools": "hermes", "policy": policy, **reading}
    return Request(
        request_id=RequestId("r"),
        prompt_ids=(1,),
        eos_ids=frozenset({EOS_ID}),
        stop=stop,
        sampling=SamplingParams(logprobs=logprobs),
        reading=AnswerReading(**marks),
    )


def emit(
    ids: Sequence[int],
    one: Request,
    sizes: Sequence[int] = (),
    finish: FinishReason = "stop",
    tokenizer: ByteTokenizer | None = None,
) -> list[Emission]:
    """Every emission of an answer, its tokens given in groups of these sizes, else one by one."""
    emitter, emissions, place = Emitter(one, tokenizer or ByteTokenizer()), [], 0
    for size in [*sizes, *[1] * len(ids)]:
        group = ids[place : place + size]
        place += size
        if not group:
            break
        emissions.append(emitter.push(group, [], finish if place >= len(ids) else None))
        if emissions[-1].finish is not None:
            break
    return emissions


def folded(emissions: Sequence[Emission]) -> dict[str, Any]:
    """What a consumer has in the end."""
    events = [event for emission in emissions for event in emission.events]
    said = {
        kind: "".join(event.text for event in events if isinstance(event, Segment) and event.kind == kind)
        for kind in ("text", "reasoning", "tool_call")
    }
    calls = [(event.name, event.arguments) for event in events if isinstance(event, ToolCall)]
    deltas = "".join(event.arguments for event in events if isinstance(event, ToolCallDelta))
    assert deltas == "".join(arguments for _, arguments in calls)
    errors = [event.reason for event in events if isinstance(event, ToolError)]
    return {**said, "calls": calls, "errors": errors, "finish": emissions[-1].finish}


def said(text: str, one: Request | None = None, **others: Any) -> dict[str, Any]:
    return folded(emit([*text.encode(), EOS_ID], one or request(), **others))


def test_answer_is_split_into_reasoning_text_and_calls() -> None:
    assert said(f"<think>\nhm\n</think>\n\nWait.\n{CALL}") == {
        "reasoning": "hm",
        "text": "Wait.",
        "tool_call": f"\n{CALL}",
        "calls": [("f", '{"a": 1}')],
        "errors": [],
        "finish": "tool_calls",
    }


@given(
    st.lists(st.sampled_from(["<think>", "</think>", "\n", "é€", "hello", CALL, BROKEN, "<tool_call>"]), max_size=6),
    st.lists(st.integers(1, 9), max_size=30),
)
def test_answer_is_the_same_however_its_tokens_come(parts: list[str], sizes: list[int]) -> None:
    text = "".join(parts)
    assert said(text, sizes=sizes) == said(text, sizes=[10_000])


def test_answer_of_a_plain_request_is_untouched() -> None:
    plain = Request(request_id=RequestId("r"), prompt_ids=(1,), eos_ids=frozenset({EOS_ID}))
    assert said(f"<think>a</think>{CALL}", plain)["text"] == f"<think>a</think>{CALL}"


def test_budget_of_tokens_that_ends_an_answer_is_its_finish_reason_even_behind_a_call() -> None:
    done = folded(emit([*CALL.encode()], request(), finish="length"))
    assert (done["calls"], done["finish"]) == ([("f", '{"a": 1}')], "length")


def test_call_that_was_cut_stays_visible_text() -> None:
    done = folded(emit([*CALL.encode()][:-3], request(), finish="length"))
    assert (done["text"], done["calls"], done["errors"]) == (CALL[:-3], [], ["unclosed"])


def test_call_with_wrong_arguments_stays_visible_text() -> None:
    done = said(BROKEN)
    assert (done["text"], done["errors"], done["finish"]) == (BROKEN, ["arguments_invalid"], "stop")


def test_answer_ends_with_its_first_call_where_one_is_wanted() -> None:
    emissions = emit([*(CALL + "\n" + CALL).encode(), EOS_ID], request(parallel=False))
    assert folded(emissions)["calls"] == [("f", '{"a": 1}')]
    assert (emissions[-1].finish, emissions[-1].num_emitted) == ("tool_calls", len(CALL))


def test_stop_string_is_looked_for_in_visible_text_alone() -> None:
    one = request(stop=("END",))
    done = said(f"<think>END</think>a EN{CALL}D b", one)
    assert done["reasoning"] == "END"
    done = said("<think>END</think>a END b", one)
    assert (done["reasoning"], done["text"], done["finish"]) == ("END", "a ", "stop")


def test_stop_string_behind_a_call_leaves_the_call() -> None:
    done = said(f"{CALL} and END b", request(stop=("END",)))
    assert (done["calls"], done["finish"]) == ([("f", '{"a": 1}')], "tool_calls")


def test_stop_string_withheld_is_released_at_the_end() -> None:
    assert said("a EN", request(stop=("END",)))["text"] == "a EN"


def test_reasoning_budget_forces_the_close_once() -> None:
    one = request(reasoning_budget=2, close_ids=CLOSE)
    emitter = Emitter(one, ByteTokenizer())
    emissions = [emitter.push([token_id], [], None) for token_id in b"<think>ab"]
    assert [bool(emission.forced_ids) for emission in emissions] == [False] * 8 + [True]
    assert emissions[-1].forced_ids == CLOSE
    assert emissions[-1].num_emitted == len(b"<think>ab</think>")
    emissions += [emitter.push([token_id], [], None) for token_id in b"</think>hi"]
    emissions.append(emitter.push([EOS_ID], [], "stop"))
    done = folded(emissions)
    assert (done["reasoning"], done["text"], emitter.num_reasoning_tokens) == ("ab", "hi", 2)
    assert not emitter.unclosed_reasoning


def test_reasoning_that_the_prompt_began_is_closed_before_the_first_token_without_a_budget() -> None:
    one = request(reasoning_budget=0, close_ids=CLOSE, prompt_tail="<think>\n")
    emission = Emitter(one, ByteTokenizer()).begin()
    assert (emission.forced_ids, emission.num_emitted, emission.events) == (CLOSE, len(CLOSE), ())


def test_reasoning_ends_when_it_is_asked_to_and_only_then() -> None:
    emitter = Emitter(request(close_ids=CLOSE), ByteTokenizer())
    emissions = [emitter.push([token_id], [], None) for token_id in b"<think>ab"]
    assert not any(emission.forced_ids for emission in emissions)
    emissions.append(emitter.end_reasoning())
    assert (emissions[-1].forced_ids, emissions[-1].num_emitted) == (CLOSE, len(b"<think>ab</think>"))
    assert emitter.end_reasoning().forced_ids == ()
    emissions += [emitter.push([token_id], [], None) for token_id in b"</think>hi"]
    emissions.append(emitter.push([EOS_ID], [], "stop"))
    done = folded(emissions)
    assert (done["reasoning"], done["text"], emitter.num_reasoning_tokens) == ("ab", "hi", 2)


def test_reasoning_that_is_ended_before_it_begins_is_closed_as_it_begins() -> None:
    emitter = Emitter(request(close_ids=CLOSE), ByteTokenizer())
    assert emitter.end_reasoning().forced_ids == ()
    emissions = [emitter.push([token_id], [], None) for token_id in b"<think>"]
    assert [bool(emission.forced_ids) for emission in emissions] == [False] * 6 + [True]


@pytest.mark.parametrize("said", [b"hello", b"<think>a</think>b"])
def test_reasoning_that_is_over_or_never_was_is_not_ended(said: bytes) -> None:
    emitter = Emitter(request(close_ids=CLOSE), ByteTokenizer())
    emitter.push(list(said), [], None)
    assert emitter.end_reasoning() == Emission((), len(said), None)
    plain = Request(request_id=RequestId("r"), prompt_ids=(1,))
    assert Emitter(plain, ByteTokenizer()).end_reasoning() == Emission((), 0, None)


def test_calls_of_a_form_that_no_module_describes_are_read() -> None:
    form = CallForm(opens=("<own>",), named=True, between=("(",), after=(")", "</own>"))
    done = folded(emit([*b'<own>f({"a": 1})</own>', EOS_ID], request(tools="derived", call_form=form)))
    assert (done["calls"], done["text"], done["finish"]) == ([("f", '{"a": 1}')], "", "tool_calls")


def test_reasoning_that_is_cut_is_reported() -> None:
    emitter = Emitter(request(), ByteTokenizer())
    emissions = [emitter.push([*b"<think>hm"], [], "length")]
    assert (folded(emissions)["reasoning"], folded(emissions)["text"]) == ("hm", "")
    assert emitter.unclosed_reasoning


@pytest.mark.parametrize(("mark", "reasoning"), [("<think>", "a"), ("<|other|>", "")])
def test_control_token_is_seen_where_it_is_a_mark_and_hidden_elsewhere(mark: str, reasoning: str) -> None:
    done = folded(emit([MARK, *b"a</think>b", EOS_ID], request(), tokenizer=MarkTokenizer(mark)))
    assert done["reasoning"] == reasoning
    assert mark not in done["text"]


def test_control_token_that_ends_the_answer_may_close_a_call() -> None:
    one = request(reasoning=None, tools="harmony", prompt_tail="<|start|>assistant")
    one = Request(request_id=one.request_id, prompt_ids=(1,), eos_ids=frozenset({MARK}), reading=one.reading)
    text = '<|channel|>commentary to=functions.f <|constrain|>json<|message|>{"a": 1}'
    done = folded(emit([*text.encode(), MARK], one, tokenizer=MarkTokenizer("<|call|>")))
    assert (done["calls"], done["finish"]) == ([("f", '{"a": 1}')], "tool_calls")


def test_every_token_is_told_with_its_logprobs_once() -> None:
    emissions = emit([*f"<think>a</think>b{CALL}".encode(), EOS_ID], request(logprobs=0))
    segments = [event for emission in emissions for event in emission.events if isinstance(event, Segment)]
    told = [token.token_id for segment in segments for token in segment.tokens]
    assert told == [*f"<think>a</think>b{CALL}".encode(), EOS_ID]
    counts = [segment.num_completion_tokens for segment in segments]
    assert counts == sorted(counts)


def test_answer_that_was_cancelled_gives_what_was_withheld() -> None:
    emitter = Emitter(request(), ByteTokenizer())
    first = emitter.push([*b"hello <tool"], [], None)
    last = emitter.close()
    assert folded([first, last])["text"] == "hello <tool"
    assert last.finish == "aborted"


def test_reading_with_an_unknown_name_is_refused() -> None:
    with pytest.raises(RequestError, match="morse"):
        Emitter(request(tools="morse"), ByteTokenizer())


def test_arguments_are_the_text_the_model_wrote() -> None:
    ((_, arguments),) = said(CALL.replace('{"a": 1}', '{ "a":1 }'))["calls"]
    assert json.loads(arguments) == {"a": 1}
