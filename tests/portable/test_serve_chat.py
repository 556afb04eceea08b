"""POST /v1/chat/completions: answers whole and streamed, sampling fields, choices, usage, log-probabilities."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from tests.portable.serving import CHAT, Asked, asking, error_of, hello, records, streamed_text
from troth.contracts.request import Request
from troth.contracts.sampling import SamplingParams
from troth.testing.byte_tokenizer import EOS_ID
from troth.testing.fake_engine import FakeAnswer, FakeEngine


@pytest.fixture(scope="module")
def client() -> Iterator[Asked]:
    """Of one server with default answers, for tests that leave nothing behind in it."""
    with asking() as client:
        yield client


def submitted(body: dict[str, Any]) -> Request:
    """The one engine request that a body becomes."""
    engine = FakeEngine()
    with asking(engine) as client:
        response = client.post(CHAT, json=body)
    assert response.status_code == 200, response.text
    (request,) = engine.requests
    return request


def test_chat_answers_with_text_usage_and_what_repeats_it() -> None:
    engine = FakeEngine(FakeAnswer(text="Grüße €", reasoning="hm", num_cached_tokens=5))
    with asking(engine) as client:
        response = client.post(CHAT, json=hello(seed=7))
    body = response.json()
    assert response.status_code == 200
    assert body["id"].startswith("chatcmpl-")
    assert (body["object"], body["model"]) == ("chat.completion", "fake")
    assert body["choices"] == [
        {
            "index": 0,
            "message": {"role": "assistant", "content": "Grüße €", "refusal": None, "reasoning_content": "hm"},
            "logprobs": None,
            "finish_reason": "stop",
        }
    ]
    num_prompt = len("user: hi\nassistant: ")
    num_completion = len("hmGrüße €".encode()) + 1
    assert body["usage"] == {
        "prompt_tokens": num_prompt,
        "completion_tokens": num_completion,
        "total_tokens": num_prompt + num_completion,
        "prompt_tokens_details": {"cached_tokens": 5},
        "completion_tokens_details": {"reasoning_tokens": 2},
    }
    assert body["troth"]["seed"] == 7
    assert set(body["troth"]["timings"]) == {"queued_s", "prefill_s", "decode_s"}
    assert "ignored" not in body["troth"]


@pytest.mark.parametrize("step_tokens", [1, 3, 1000])
def test_chat_stream_equals_whole(step_tokens: int) -> None:
    """The law ``stream == whole``, with characters split between tokens."""
    answer = FakeAnswer(text="Grüße an die 世界 🌍!", reasoning="hm… ok", step_tokens=step_tokens)
    with asking(FakeEngine(answer)) as client:
        whole = client.post(CHAT, json=hello()).json()
        stream = records(client.post(CHAT, json=hello(stream=True, stream_options={"include_usage": True})).text)
    message = whole["choices"][0]["message"]
    assert streamed_text(stream) == message["content"] == answer.text
    assert streamed_text(stream, field="reasoning_content") == message["reasoning_content"] == answer.reasoning
    assert stream[-1]["usage"] == whole["usage"]
    assert stream[-2]["choices"][0]["finish_reason"] == whole["choices"][0]["finish_reason"]


def test_chat_stream_has_the_records_clients_expect() -> None:
    with asking(FakeEngine("ab")) as client:
        response = client.post(CHAT, json=hello(stream=True, seed=3))
    assert response.headers["content-type"].startswith("text/event-stream")
    stream = records(response.text)
    assert [one["choices"][0]["delta"] for one in stream] == [
        {"role": "assistant", "content": ""},
        {"content": "a"},
        {"content": "b"},
        {},
    ]
    assert [one["choices"][0]["finish_reason"] for one in stream] == [None, None, None, "stop"]
    assert len({(one["id"], one["created"], one["model"], one["object"]) for one in stream}) == 1
    assert stream[0]["object"] == "chat.completion.chunk"
    assert stream[-1]["troth"]["seed"] == 3
    assert all("usage" not in one for one in stream)


def test_chat_stream_sends_usage_only_on_request_and_without_choices() -> None:
    with asking(FakeEngine("ab")) as client:
        stream = records(client.post(CHAT, json=hello(stream=True, stream_options={"include_usage": True})).text)
    assert [bool(one.get("usage")) for one in stream] == [False] * 4 + [True]
    assert stream[-1]["choices"] == []
    assert stream[-1]["usage"]["completion_tokens"] == 3


def test_chat_stream_shows_progress_on_request() -> None:
    answer = FakeAnswer(text="x", chunk_tokens=8, num_cached_tokens=4)
    with asking(FakeEngine(answer, step_s=0.005)) as client:
        body = hello(stream=True, stream_options={"include_progress": True})
        stream = records(client.post(CHAT, json=body).text)
        plain = records(client.post(CHAT, json=hello(stream=True)).text)
    notices = [one["troth"]["prefill"] for one in stream if not one["choices"]]
    assert [(one["done"], one["cached"], one["total"]) for one in notices] == [(12, 4, 20), (20, 4, 20)]
    assert notices[0]["eta_s"] > 0
    assert notices[1]["eta_s"] == 0
    assert all(one["choices"] for one in plain)


def test_chat_choices_come_apart_with_seeds_of_their_own() -> None:
    def name(request: Request) -> FakeAnswer:
        return FakeAnswer(text=str(request.sampling.seed))

    engine = FakeEngine(name)
    with asking(engine) as client:
        whole = client.post(CHAT, json=hello(n=3, seed=11)).json()
        stream = records(client.post(CHAT, json=hello(n=3, seed=11, stream=True)).text)
        alone = client.post(CHAT, json=hello(seed=11)).json()
    texts = [choice["message"]["content"] for choice in whole["choices"]]
    assert [choice["index"] for choice in whole["choices"]] == [0, 1, 2]
    assert [streamed_text(stream, choice) for choice in range(3)] == texts
    assert texts[0] == "11" == alone["choices"][0]["message"]["content"]
    assert len(set(texts)) == 3
    ends = [one["choices"][0] for one in stream if one["choices"] and one["choices"][0]["finish_reason"]]
    assert sorted(end["index"] for end in ends) == [0, 1, 2]


def test_chat_usage_counts_a_prompt_once_and_every_choice() -> None:
    with asking(FakeEngine("abc")) as client:
        usage = client.post(CHAT, json=hello(n=3)).json()["usage"]
    assert (usage["prompt_tokens"], usage["completion_tokens"]) == (20, 12)


def test_chat_without_seed_gets_one_that_repeats_it() -> None:
    engine = FakeEngine()
    with asking(engine) as client:
        seed = client.post(CHAT, json=hello()).json()["troth"]["seed"]
        other = client.post(CHAT, json=hello()).json()["troth"]["seed"]
        client.post(CHAT, json=hello(seed=seed))
    assert seed != other
    assert 0 <= seed < 2**53, "exact in a 64-bit float"
    assert engine.requests[0].sampling == engine.requests[2].sampling


def test_chat_hands_every_field_to_the_engine() -> None:
    request = submitted(
        hello(
            temperature=0.5,
            top_p=0.9,
            top_k=40,
            min_p=0.05,
            xtc_probability=0.3,
            xtc_threshold=0.2,
            repetition_penalty=1.1,
            presence_penalty=0.4,
            frequency_penalty=-0.4,
            logit_bias={"65": -100, "3": 2.5},
            seed=99,
            logprobs=True,
            top_logprobs=4,
            max_tokens=6,
            stop=["\n", "END"],
        )
    )
    assert request.sampling == SamplingParams(
        temperature=0.5,
        top_p=0.9,
        top_k=40,
        min_p=0.05,
        xtc_probability=0.3,
        xtc_threshold=0.2,
        repetition_penalty=1.1,
        presence_penalty=0.4,
        frequency_penalty=-0.4,
        logit_bias=((3, 2.5), (65, -100.0)),
        seed=99,
        logprobs=4,
    )
    assert (request.max_tokens, request.stop) == (6, ("\n", "END"))
    assert request.eos_ids == {EOS_ID}
    assert bytes(request.prompt_ids) == b"user: hi\nassistant: "
    assert request.boundary == len("user: hi\n")


def test_chat_with_explicit_nulls_is_chat_without_the_fields() -> None:
    names = "temperature top_p top_k stop max_tokens n logprobs top_logprobs logit_bias stream stream_options tools"
    request = submitted(hello(**dict.fromkeys(names.split()), seed=5))
    assert request == Request(
        request_id=request.request_id,
        prompt_ids=request.prompt_ids,
        sampling=SamplingParams(seed=5),
        eos_ids=frozenset({EOS_ID}),
        boundary=9,
    )


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"max_completion_tokens": 5}, 5),
        ({"max_tokens": 5, "max_completion_tokens": 5}, 5),
        ({}, None),
    ],
)
def test_chat_takes_either_name_of_the_limit(fields: dict[str, Any], expected: int | None) -> None:
    assert submitted(hello(**fields)).max_tokens == expected


def test_chat_reads_a_negative_seed_as_its_unsigned_bits() -> None:
    assert submitted(hello(seed=-1)).sampling.seed == 2**64 - 1


def test_chat_ignore_eos_runs_to_the_limit() -> None:
    with asking(FakeEngine("ab")) as client:
        choice = client.post(CHAT, json=hello(ignore_eos=True, max_tokens=5)).json()["choices"][0]
    assert choice["message"]["content"] == "ababa"
    assert choice["finish_reason"] == "length"


def test_chat_says_whether_and_with_whom_its_prompt_is_cached() -> None:
    engine = FakeEngine("ab")
    with asking(engine) as client:
        for fields in ({}, {"prompt_cache": False, "cache_salt": "team"}):
            assert client.post(CHAT, json=hello(**fields)).status_code == 200
        refused = client.post(CHAT, json=hello(cache_salt="x" * 257)).json()["error"]
    assert [(one.prompt_cache, one.namespace) for one in engine.requests] == [(True, ""), (False, "team")]
    assert refused["param"] == "cache_salt"


@pytest.mark.parametrize("stop", ["world", ["never", "world"]])
def test_chat_stops_before_a_stop_string(stop: str | list[str]) -> None:
    with asking(FakeEngine("Hello world and more")) as client:
        choice = client.post(CHAT, json=hello(stop=stop)).json()["choices"][0]
    assert choice["message"]["content"] == "Hello "
    assert choice["finish_reason"] == "stop"


def test_chat_logprobs_have_an_entry_per_completion_token_whole_and_streamed() -> None:
    body = hello(logprobs=True, top_logprobs=2, max_tokens=4)
    with asking(FakeEngine("aß")) as client:
        whole = client.post(CHAT, json=body).json()
        stream = records(client.post(CHAT, json={**body, "stream": True}).text)
    entries = whole["choices"][0]["logprobs"]["content"]
    assert [entry["token"] for entry in entries] == ["a", "bytes:\\xc3", "bytes:\\x9f", "<end>"]
    assert [entry["bytes"] for entry in entries] == [[97], [0xC3], [0x9F], list(b"<end>")]
    assert len(entries) == whole["usage"]["completion_tokens"]
    assert [one["token"] for one in entries[0]["top_logprobs"]] == ["a", "b"]
    assert entries[0]["top_logprobs"][1]["logprob"] == -1.25
    from_stream = [entry for one in stream for entry in (one["choices"][0]["logprobs"] or {"content": []})["content"]]
    assert from_stream == entries


def test_chat_logprobs_alone_list_no_alternatives() -> None:
    with asking(FakeEngine("a")) as client:
        choice = client.post(CHAT, json=hello(logprobs=True)).json()["choices"][0]
    assert [entry["top_logprobs"] for entry in choice["logprobs"]["content"]] == [[], []]


def test_chat_continues_a_trailing_assistant_message() -> None:
    messages = [{"role": "user", "content": "count"}, {"role": "assistant", "content": "one, two"}]
    request = submitted({"messages": messages})
    assert bytes(request.prompt_ids) == b"user: count\nassistant: one, two"
    assert request.boundary is None


def test_chat_takes_an_empty_trailing_assistant_message_as_none() -> None:
    messages = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": ""}]
    assert submitted({"messages": messages}).prompt_ids == submitted(hello()).prompt_ids


@pytest.mark.parametrize(
    "last",
    [
        {"content": "", "reasoning_content": "Hm."},
        {"content": None, "reasoning": "Hm."},
        {"content": [{"type": "thinking", "thinking": "Hm."}]},
    ],
)
def test_chat_refuses_to_continue_reasoning_by_name(last: dict[str, Any]) -> None:
    """It is not dropped in silence, and not answered as if it had been said."""
    messages = [{"role": "user", "content": "hi"}, {"role": "assistant", **last}]
    with asking() as client:
        refused = client.post(CHAT, json={"messages": messages})
        earlier = client.post(CHAT, json={"messages": [*messages, {"role": "user", "content": "go on"}]})
    assert refused.status_code == 400
    error = refused.json()["error"]
    assert (error["code"], error["param"]) == ("capability_unavailable", "messages[1]")
    assert error["message"].startswith("continuing reasoning is not available: the last message is an assistant's")
    assert earlier.status_code == 200


def test_chat_joins_text_parts_and_keeps_roles() -> None:
    messages = [
        {"role": "developer", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
        {"role": "assistant", "content": None, "tool_calls": [{"id": "1", "function": {"name": "f"}}]},
        {"role": "tool", "tool_call_id": "1", "content": "3"},
    ]
    prompt = bytes(submitted({"messages": messages}).prompt_ids).decode()
    assert prompt == "system: a\nb\nassistant: \ntool: 3\nassistant: "


def test_chat_passes_template_variables_on() -> None:
    prompt = bytes(submitted(hello(chat_template_kwargs={"enable_thinking": False})).prompt_ids).decode()
    assert prompt.startswith("enable_thinking=False\n")


def test_chat_lists_unknown_fields_when_asked_to() -> None:
    body = hello(user="me", metadata={}, store=False, guided_tree={}, wild=1)
    with asking() as client:
        told = client.post(CHAT, json=body, headers={"x-troth-debug": "1"}).json()
        silent = client.post(CHAT, json=body).json()
        stream = records(client.post(CHAT, json={**body, "stream": True}, headers={"x-troth-debug": "1"}).text)
    assert told["troth"]["ignored"] == ["guided_tree", "wild"]
    assert stream[-1]["troth"]["ignored"] == ["guided_tree", "wild"]
    assert "ignored" not in silent["troth"]


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("functions", [{"name": "f"}]),
        ("function_call", {"name": "f"}),
        ("modalities", ["text", "audio"]),
        ("audio", {"voice": "x"}),
        ("web_search_options", {}),
    ],
)
def test_chat_refuses_by_name_what_it_cannot_do(client: Asked, field: str, value: Any) -> None:
    response = client.post(CHAT, json=hello(**{field: value}))
    assert response.status_code == 400
    error = error_of(response)
    assert (error["param"], error["code"]) == (field, "unsupported_parameter")
    assert field in error["message"]


@pytest.mark.parametrize(
    "fields",
    [
        {"tools": []},
        {"tool_choice": "auto"},
        {"tool_choice": "none", "parallel_tool_calls": False},
        {"functions": None},
        {"response_format": {"type": "text"}},
        {"modalities": ["text"]},
        {"prediction": {"type": "content", "content": "x"}},
    ],
)
def test_chat_tolerates_fields_that_ask_for_nothing(client: Asked, fields: dict[str, Any]) -> None:
    assert client.post(CHAT, json=hello(**fields)).status_code == 200
