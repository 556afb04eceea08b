"""Messages survive the wire exactly, and what is no message is refused in words."""

from __future__ import annotations

import math
from contextlib import suppress

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from troth.contracts.answer import AnswerReading
from troth.contracts.events import Completed, Failed, Prefill, Queued, Segment, Timings, TokenText, Usage
from troth.contracts.grammar import Grammar
from troth.contracts.memory_plan import GroupPlan, MemoryPlan
from troth.contracts.plan import TokenLogprobs
from troth.contracts.ports import EngineInfo, EngineStatus
from troth.contracts.prefix_cache import DiskCacheStatus, PrefixCacheStatus
from troth.contracts.request import Request
from troth.contracts.sampling import SamplingParams
from troth.contracts.speculation import Speculation, SpeculationStats
from troth.contracts.tools import CallForm, ToolCall, ToolCallDelta, ToolChoice, ToolError, ToolPolicy, ToolSpec
from troth.errors import StreamProtocol
from troth.runtime import wire

COUNT = st.integers(0, 2**63 - 1)
TEXT = st.text(st.characters(exclude_categories=("Cs",)), max_size=40)
FLOAT = st.floats(allow_nan=False)
LOGPROBS = st.builds(
    TokenLogprobs,
    token_id=COUNT,
    logprob=FLOAT,
    rank=COUNT,
    top_ids=st.lists(COUNT, max_size=3),
    top_logprobs=st.lists(FLOAT, max_size=3),
)
SAMPLING = st.builds(
    SamplingParams,
    temperature=st.floats(0, 100),
    top_p=st.floats(0.01, 1),
    top_k=st.integers(0, 2**31 - 1),
    min_p=st.floats(0, 1),
    repetition_penalty=st.floats(0.01, 100),
    presence_penalty=st.floats(-2, 2),
    logit_bias=st.lists(st.tuples(st.integers(0, 2**31 - 1), st.floats(-100, 100)), unique_by=lambda p: p[0]).map(
        tuple
    ),
    seed=st.integers(0, 2**64 - 1),
    logprobs=st.none() | st.integers(0, 20),
    prompt_logprobs=st.none() | st.integers(0, 20),
)
SCHEMA = st.none() | st.booleans() | st.dictionaries(TEXT, st.none() | st.booleans() | COUNT | TEXT | st.lists(COUNT))
TOOL_ERROR = st.builds(
    ToolError,
    reason=st.sampled_from(["malformed", "arguments_invalid"]),
    message=TEXT,
    name=st.none() | TEXT,
    call_id=st.none() | TEXT,
    pointer=TEXT,
)
WORDS = st.lists(TEXT, max_size=2).map(tuple)
REQUEST = st.builds(
    Request,
    request_id=TEXT,
    prompt_ids=st.lists(st.integers(0, 2**31), max_size=20).map(tuple),
    sampling=SAMPLING,
    max_tokens=st.none() | st.integers(1, 2**63 - 1),
    eos_ids=st.frozensets(COUNT, max_size=4),
    stop=st.lists(TEXT.filter(bool), max_size=3).map(tuple),
    grammar=st.none()
    | st.builds(
        Grammar,
        kind=st.sampled_from(["json_schema", "regex", "lark", "calls"]),
        source=TEXT.filter(bool),
        strict=st.booleans(),
        frame=TEXT,
        begins_after=TEXT,
    )
    | st.builds(
        Grammar, kind=st.just("choice"), choices=st.lists(TEXT.filter(bool), min_size=1, max_size=3).map(tuple)
    ),
    reading=st.none()
    | st.builds(
        AnswerReading,
        reasoning=st.none() | TEXT,
        tools=st.none() | TEXT,
        call_form=st.none()
        | st.builds(
            CallForm, opens=WORDS, closes=WORDS, named=st.booleans(), before_name=WORDS, between=WORDS, after=WORDS
        ),
        policy=st.builds(
            ToolPolicy,
            tools=st.lists(st.builds(ToolSpec, name=TEXT, parameters=SCHEMA, strict=st.booleans()), max_size=2).map(
                tuple
            ),
            choice=st.builds(ToolChoice, mode=st.sampled_from(["auto", "named"]), name=st.none() | TEXT),
            validation=st.sampled_from(["strict", "forward"]),
            parallel=st.booleans(),
        ),
        prompt_tail=TEXT,
        continues=st.none() | st.just("text"),
        reasoning_budget=st.none() | COUNT,
        close_ids=st.lists(COUNT, max_size=3).map(tuple),
    ),
    echo_special=st.booleans(),
    boundary=st.none() | COUNT,
    checkpoint_positions=st.lists(COUNT, max_size=3).map(tuple),
    namespace=TEXT,
    prompt_cache=st.booleans(),
    speculation=st.none()
    | st.builds(
        Speculation,
        sources=st.sampled_from([("external",), ("grammar", "external", "ngram")]),
        depth=st.none() | st.integers(1, 16),
        adaptive=st.booleans(),
        predicted_ids=st.lists(COUNT, max_size=3).map(tuple),
    ),
    priority=st.integers(-(2**31), 2**31),
)
EVENT = st.one_of(
    st.builds(Queued, position=COUNT),
    st.builds(Prefill, num_done=COUNT, num_cached=COUNT, num_total=COUNT),
    st.builds(
        Segment,
        text=TEXT,
        kind=st.sampled_from(["text", "reasoning", "tool_call"]),
        tokens=st.lists(st.builds(TokenText, token_id=COUNT, logprobs=st.none() | LOGPROBS), max_size=3).map(tuple),
        num_completion_tokens=COUNT,
    ),
    st.builds(ToolCallDelta, index=COUNT, id=st.none() | TEXT, name=st.none() | TEXT, arguments=TEXT),
    st.builds(ToolCall, index=COUNT, id=TEXT, name=TEXT, arguments=TEXT, error=st.none() | TOOL_ERROR),
    TOOL_ERROR,
    st.builds(
        Completed,
        finish_reason=st.sampled_from(["stop", "length", "tool_calls", "aborted"]),
        unclosed_reasoning=st.booleans(),
        usage=st.builds(Usage, num_prompt_tokens=COUNT, num_completion_tokens=COUNT),
        timings=st.builds(Timings, queued_s=FLOAT, prefill_s=FLOAT, decode_s=FLOAT),
        seed=st.integers(0, 2**64 - 1),
        stop_match=st.none() | TEXT,
        prompt_logprobs=st.none() | st.lists(LOGPROBS, max_size=3).map(tuple),
        speculation=st.none()
        | st.builds(
            SpeculationStats,
            num_verifies=COUNT,
            accepted_by_depth=st.lists(COUNT, max_size=3).map(tuple),
            num_drafted_by_source=st.dictionaries(TEXT, COUNT, max_size=2),
            disabled_reason=st.none() | TEXT,
        ),
    ),
    st.builds(
        Failed,
        kind=TEXT,
        message=TEXT,
        param=st.none() | TEXT,
        code=st.none() | TEXT,
        retry_after_s=st.none() | FLOAT,
    ),
)
PLAN = MemoryPlan(
    device="cpu",
    dtype="float32",
    weights_bytes=1 << 40,
    groups=(GroupPlan(name="full", num_blocks=3, bytes_per_block=4),),
    state_bytes=0,
    transient_bytes=1,
    reserve_bytes=2,
    usable_bytes=1 << 41,
    context_tokens=4096,
    declared_context_tokens=8192,
    max_rows=8,
    decisions=("because",),
)
INFO = EngineInfo(
    model="m",
    family="llama",
    context_tokens=4096,
    max_rows=8,
    vocab_size=49152,
    max_waiting=64,
    device="cpu",
    dtype="float32",
    kv_dtype="float32",
    pipeline_depth=1,
    plan=PLAN,
    load_s=1.25,
)
STATUS = EngineStatus(
    state="ready",
    num_running=1,
    num_waiting=2,
    num_steps=3,
    blocks_used=(4, 5),
    blocks_free=(6, 7),
    num_prompt_tokens=8,
    num_completion_tokens=9,
    num_cached_tokens=10,
    num_preemptions=11,
    num_requests_by_end={"stop": 12},
    downgrades=("slow",),
    speculation=SpeculationStats(num_verifies=13, num_drafted=14, num_accepted=15),
    prefix_cache=PrefixCacheStatus(
        num_blocks=(1, 2),
        num_admissions={"hit": 3},
        num_refused_tokens={"window_lost": 4},
        disk=DiskCacheStatus(folder="/c", num_bytes=5, quota_bytes=6, num_restores={"restored": 7}, trouble="full"),
    ),
)


@settings(max_examples=150, deadline=None)
@given(stream=COUNT, request=REQUEST)
def test_submit_survives_the_wire_exactly(stream: int, request: Request) -> None:
    message = wire.Submit(stream, request)
    assert wire.decode_to_engine(wire.encode(message)) == message


@settings(max_examples=150, deadline=None)
@given(events=st.lists(st.tuples(COUNT, EVENT), max_size=8))
def test_events_survive_the_wire_in_order_and_exactly(events: list[tuple[int, wire.Event]]) -> None:
    message = wire.Events([wire.item(stream, event) for stream, event in events])
    back = wire.decode_to_server(wire.encode(message))
    assert back == message
    assert isinstance(back, wire.Events)
    assert [(one.stream, one.event) for one in back.items] == events


@pytest.mark.parametrize(
    "message",
    [
        wire.Credit([(1, 16, 100), (2**40, 0, 0)]),
        wire.Cancel(3, "disconnected"),
        wire.EndReasoning(3),
        wire.AskStatus(4),
        wire.Unpin("system prompt"),
        wire.Close(),
    ],
)
def test_messages_to_the_engine_survive_the_wire(message: wire.ToEngine) -> None:
    assert wire.decode_to_engine(wire.encode(message)) == message


@pytest.mark.parametrize(
    "message",
    [
        wire.Hello(wire.WIRE_VERSION, "token", 123),
        wire.Loading("weights", 3, 4),
        wire.Ready(INFO),
        wire.LoadFailed("ModelLoadError", "no such file"),
        wire.Status(5, STATUS),
        wire.Alive(),
        wire.Closed(),
    ],
)
def test_messages_to_the_server_survive_the_wire(message: wire.ToServer) -> None:
    assert wire.decode_to_server(wire.encode(message)) == message


def test_event_keeps_infinite_logprobs() -> None:
    entry = TokenLogprobs(1, -math.inf, 3, [2], [-math.inf])
    event = Segment(text="", tokens=(TokenText(token_id=1, logprobs=entry),), num_completion_tokens=1)
    back = wire.decode_to_server(wire.encode(wire.Events([wire.item(1, event)])))
    assert isinstance(back, wire.Events)
    assert back.items[0].event == event


@settings(max_examples=200, deadline=None)
@given(frame=st.binary(max_size=60))
def test_frame_of_random_bytes_is_a_message_or_a_protocol_error(frame: bytes) -> None:
    for decode in (wire.decode_to_engine, wire.decode_to_server):
        with suppress(StreamProtocol):
            assert isinstance(decode(frame), msgspec.Struct)


@pytest.mark.parametrize(
    ("frame", "clue"),
    [
        (b"", "truncated"),
        (msgspec.msgpack.encode([99, 1]), "99"),
        (msgspec.msgpack.encode({"tag": 1}), "array"),
        (msgspec.msgpack.encode([3, "one", "reason"]), "int"),
        (wire.encode(wire.Cancel(1, "x"))[:-1], "truncated"),
    ],
)
def test_decode_says_what_is_wrong_with_a_malformed_frame(frame: bytes, clue: str) -> None:
    with pytest.raises(StreamProtocol, match=clue):
        wire.decode_to_engine(frame)


def test_decode_refuses_values_that_a_contract_forbids() -> None:
    frame = msgspec.msgpack.encode([1, 7, {"request_id": "r", "prompt_ids": [1], "sampling": {"temperature": -1.0}}])
    with pytest.raises(StreamProtocol, match="temperature must be between"):
        wire.decode_to_engine(frame)


def test_hello_of_another_version_with_more_fields_is_still_understood() -> None:
    hello = wire.decode_to_server(msgspec.msgpack.encode([10, 99, "token", 1, "a later field"]))
    assert hello == wire.Hello(99, "token", 1)
