"""POST /v1/completions: prompts of every form, echo, legacy log-probabilities."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from tests.portable.serving import COMPLETIONS, Asked, asking, error_of, records
from troth.contracts.request import Request
from troth.testing.byte_tokenizer import BytePrompt, BytePrompts
from troth.testing.fake_engine import FakeAnswer, FakeEngine
from troth.testing.fake_server import byte_model


@pytest.fixture(scope="module")
def client() -> Iterator[Asked]:
    """Of one server with default answers, for tests that leave nothing behind in it."""
    with asking() as client:
        yield client


def echo_prompt(request: Request) -> FakeAnswer:
    """Answers with the prompt in brackets, so that choices tell which prompt they belong to."""
    return FakeAnswer(text=f"[{bytes(request.prompt_ids).decode()}]")


@pytest.mark.parametrize(
    ("prompt", "texts"),
    [
        ("ab", ["[ab]"]),
        (["ab", "c"], ["[ab]", "[c]"]),
        ([97, 98], ["[ab]"]),
        ([[97, 98], [99]], ["[ab]", "[c]"]),
        (["ab", [99]], ["[ab]", "[c]"]),
    ],
)
def test_completion_takes_text_and_token_ids_alone_and_in_lists(prompt: Any, texts: list[str]) -> None:
    with asking(FakeEngine(echo_prompt)) as client:
        body = client.post(COMPLETIONS, json={"prompt": prompt}).json()
    assert body["object"] == "text_completion"
    assert body["id"].startswith("cmpl-")
    assert [choice["text"] for choice in body["choices"]] == texts
    assert [choice["index"] for choice in body["choices"]] == list(range(len(texts)))


def test_completion_orders_choices_by_prompt_then_number() -> None:
    with asking(FakeEngine(echo_prompt)) as client:
        body = client.post(COMPLETIONS, json={"prompt": ["a", "b"], "n": 2}).json()
    assert [choice["text"] for choice in body["choices"]] == ["[a]", "[a]", "[b]", "[b]"]
    assert body["usage"]["prompt_tokens"] == 2


def test_completion_stream_equals_whole_for_every_choice() -> None:
    fields = {"prompt": ["a€", "b"], "n": 2, "echo": True, "seed": 1}
    with asking(FakeEngine(echo_prompt)) as client:
        whole = client.post(COMPLETIONS, json=fields).json()
        stream = records(client.post(COMPLETIONS, json={**fields, "stream": True}).text)
    for choice in whole["choices"]:
        pieces = [one["choices"][0] for one in stream if one["choices"][0]["index"] == choice["index"]]
        assert "".join(piece["text"] for piece in pieces) == choice["text"]
        assert pieces[-1]["finish_reason"] == choice["finish_reason"] == "stop"
    assert whole["choices"][0]["text"] == "a€[a€]"


def test_completion_logprobs_have_offsets_into_the_text() -> None:
    with asking(FakeEngine("x€y")) as client:
        choice = client.post(COMPLETIONS, json={"prompt": "p", "logprobs": 1, "max_tokens": 5}).json()["choices"][0]
    assert choice["text"] == "x€y"
    logprobs = choice["logprobs"]
    assert logprobs["tokens"] == ["x", "bytes:\\xe2", "bytes:\\x82", "bytes:\\xac", "y"]
    assert logprobs["text_offset"] == [0, 1, 1, 1, 2]
    assert logprobs["token_logprobs"] == [-0.25] * 5
    assert logprobs["top_logprobs"][0] == {"x": -0.25}


def test_completion_echo_with_logprobs_scores_the_prompt() -> None:
    fields = {"prompt": "ab", "echo": True, "logprobs": 2, "max_tokens": 1}
    with asking(FakeEngine("c")) as client:
        choice = client.post(COMPLETIONS, json=fields).json()["choices"][0]
    assert choice["text"] == "abc"
    logprobs = choice["logprobs"]
    assert logprobs["tokens"] == ["a", "b", "c"]
    assert logprobs["token_logprobs"] == [None, -0.25, -0.25]
    assert logprobs["top_logprobs"] == [None, {"b": -0.25, "c": -1.25}, {"c": -0.25, "d": -1.25}]
    assert logprobs["text_offset"] == [0, 1, 2]


def test_completion_stream_logprobs_continue_their_offsets() -> None:
    fields = {"prompt": "p", "logprobs": 0, "stream": True}
    with asking(FakeEngine("abc")) as client:
        stream = records(client.post(COMPLETIONS, json=fields).text)
    offsets = [one["choices"][0]["logprobs"]["text_offset"] for one in stream if one["choices"][0]["logprobs"]]
    assert offsets == [[0], [1], [2], [3]]


@pytest.mark.parametrize(
    ("fields", "param", "code"),
    [
        ({}, "prompt", "missing_required_parameter"),
        ({"prompt": []}, "prompt", "invalid_value"),
        ({"prompt": 3}, "prompt", "invalid_type"),
        ({"prompt": [1, "a"]}, "prompt", "invalid_type"),
        ({"prompt": ["a", 1]}, "prompt[1]", "invalid_type"),
        ({"prompt": [[1, True]]}, "prompt[0]", "invalid_type"),
        ({"prompt": [999]}, "prompt", "invalid_value"),
        ({"prompt": [10**30]}, "prompt", "invalid_value"),
        ({"prompt": ""}, "prompt", "invalid_value"),
        ({"prompt": ["a"] * 129}, "prompt", "invalid_value"),
        ({"prompt": ["a"] * 40, "n": 2}, "n", "invalid_value"),
        ({"prompt": "a", "logprobs": True}, "logprobs", "invalid_type"),
        ({"prompt": "a", "logprobs": 21}, "logprobs", "invalid_value"),
        ({"prompt": "a", "best_of": 2}, "best_of", "unsupported_parameter"),
        ({"prompt": "a", "suffix": "b"}, "suffix", "unsupported_parameter"),
        ({"prompt": "a", "echo": True, "logprobs": 1, "stream": True}, "echo", "unsupported_parameter"),
        ({"prompt": "a", "max_tokens": 0}, "max_tokens", "invalid_value"),
    ],
)
def test_completion_refuses_what_it_cannot_do_and_names_the_field(
    client: Asked, fields: dict[str, Any], param: str, code: str
) -> None:
    response = client.post(COMPLETIONS, json=fields)
    assert response.status_code == 400
    error = error_of(response)
    assert (error["param"], error["code"]) == (param, code)


def test_completion_of_too_many_answers_tells_how_many_they_are() -> None:
    """ "1 prompts with 100 choices each are 100 answers" was not English."""
    with asking() as client:
        one = client.post(COMPLETIONS, json={"prompt": "a", "n": 100})
        forty = client.post(COMPLETIONS, json={"prompt": ["a"] * 40, "n": 2})
    assert error_of(one)["message"] == "prompts (1) times n (100) is 100 answers; at most 72 fit into one request"
    assert error_of(forty)["message"] == "prompts (40) times n (2) is 80 answers; at most 72 fit into one request"


def test_completion_tolerates_best_of_that_returns_every_choice() -> None:
    with asking(FakeEngine("x")) as client:
        body = client.post(COMPLETIONS, json={"prompt": "a", "n": 2, "best_of": 2, "suffix": ""}).json()
    assert len(body["choices"]) == 2


@pytest.mark.parametrize(
    ("bad", "param"), [("x" * 40, "prompt"), ("x" * 27, "max_tokens"), ("", "prompt"), ([], "prompt")]
)
@pytest.mark.parametrize("stream", [False, True])
def test_completion_with_one_prompt_that_cannot_be_served_is_refused_whole(bad: Any, param: str, stream: bool) -> None:
    """The other prompts' answers had begun by then: an error inside a stream of status 200."""
    engine = FakeEngine(context_tokens=30)
    with asking(engine) as client:
        response = client.post(COMPLETIONS, json={"prompt": ["a", bad, "b"], "max_tokens": 5, "stream": stream})
    assert response.status_code == 400
    assert error_of(response)["param"] == param
    assert engine.requests == []


def test_completion_of_many_prompts_stops_at_the_first_that_does_not_fit() -> None:
    """All of them were tokenised first: ten seconds for 64 prompts of 150 kB."""

    class Counting(BytePrompts):
        num_built = 0

        def completion(self, text: str) -> BytePrompt:
            Counting.num_built += 1
            return super().completion(text)

    engine = FakeEngine(context_tokens=30)
    with asking([byte_model(engine, prompts=Counting())]) as client:
        response = client.post(COMPLETIONS, json={"prompt": ["a", *["x" * 40] * 60]})
    assert (response.status_code, Counting.num_built) == (400, 2)
