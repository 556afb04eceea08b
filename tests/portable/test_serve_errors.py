"""Refusals before an answer begins: bodies that are no requests, and errors of the engine, each with its status."""

from __future__ import annotations

import inspect
import json
from collections.abc import Iterator
from typing import Any

import pytest

import troth.errors
from tests.portable.serving import CHAT, Asked, asking, error_of, hello, serving
from troth.contracts.events import Failed
from troth.errors import DeviceError, ModelLoadError, TrothError
from troth.serve.errors import _TABLE, EngineFailure, error_response
from troth.testing.fake_engine import FakeAnswer, FakeEngine

DEEP = 100_000


@pytest.fixture(scope="module")
def client() -> Iterator[Asked]:
    """Of one server with default answers, for tests that leave nothing behind in it."""
    with asking() as client:
        yield client


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{",
        b"[]",
        b'"text"',
        b"null",
        b'{"messages": [}',
        b'{"temperature": NaN}',
        b'{"temperature": Infinity}',
        b'{"temperature": 1e999}',
        b'{"seed": ' + b"9" * 10_000 + b"}",
        b'{"messages": ' + b"[" * DEEP + b"]" * DEEP + b"}",
        b'{"messages": [{"role": "user", "content": "\\ud800"}]}',
        b'{"messages": [{"role": "user", "content": "\xff"}]}',
        b'{"messages": [{"role": "user", "content": "\xed\xa0\x80"}]}',
        '{"messages": []}'.encode("utf-16"),
        b'{"messages": []} trailing',
    ],
    ids=lambda body: repr(body[:24]),
)
def test_body_that_is_not_a_json_object_is_refused_and_the_server_lives(client: Asked, body: bytes) -> None:
    response = client.post(CHAT, content=body, headers={"content-type": "application/json"})
    assert response.status_code == 400
    assert error_of(response)["code"] in ("invalid_json", "invalid_type")
    assert client.post(CHAT, json=hello()).status_code == 200


def test_body_with_a_lone_surrogate_is_told_so() -> None:
    with asking() as client:
        response = client.post(CHAT, content=b'{"messages": [{"role": "user", "content": "\\udc00 x"}]}')
    assert "surrogate" in error_of(response)["message"]


def test_body_with_duplicate_keys_counts_the_last() -> None:
    body = b'{"max_tokens": 1, "messages": [{"role": "user", "content": "hi"}], "max_tokens": 2}'
    with asking() as client:
        assert client.post(CHAT, content=body).json()["usage"]["completion_tokens"] == 2


@pytest.mark.parametrize(
    ("fields", "param", "code"),
    [
        ({"messages": None}, "messages", "missing_required_parameter"),
        ({"messages": []}, "messages", "invalid_value"),
        ({"messages": "hi"}, "messages", "invalid_type"),
        ({"messages": {"role": "user"}}, "messages", "invalid_type"),
        ({"messages": ["hi"]}, "messages[0]", "invalid_type"),
        ({"messages": [{"content": "hi"}]}, "messages[0].role", None),
        ({"messages": [{"role": "king", "content": "hi"}]}, "messages[0].role", None),
        ({"messages": [{"role": 3, "content": "hi"}]}, "messages[0].role", None),
        ({"messages": [{"role": "king" * 100_000, "content": "hi"}]}, "messages[0].role", None),
        ({"messages": [{"role": "user"}]}, "messages[0].content", None),
        ({"messages": [{"role": "user", "content": 3}]}, "messages[0].content", None),
        ({"messages": [{"role": "user", "content": [3]}]}, "messages[0].content[0]", None),
        ({"messages": [{"role": "user", "content": [{"type": "text"}]}]}, "messages[0].content[0].text", None),
        (
            {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]},
            "messages[0].content[0]",
            None,
        ),
        (
            {"messages": [{"role": "user", "content": "x"}, {"role": "assistant", "tool_calls": [{"function": {}}]}]},
            "messages[1].tool_calls[0].function.name",
            None,
        ),
        ({"temperature": "hot"}, "temperature", "invalid_type"),
        ({"temperature": True}, "temperature", "invalid_type"),
        ({"temperature": -0.1}, "temperature", "invalid_value"),
        ({"temperature": 10**400}, "temperature", "invalid_value"),
        ({"top_p": 0}, "top_p", "invalid_value"),
        ({"top_p": 1.5}, "top_p", "invalid_value"),
        ({"top_k": 1.5}, "top_k", "invalid_type"),
        ({"top_k": -2}, "top_k", "invalid_value"),
        ({"min_p": 2}, "min_p", "invalid_value"),
        ({"seed": 2**64}, "seed", "invalid_value"),
        ({"seed": 1.5}, "seed", "invalid_type"),
        ({"n": 0}, "n", "invalid_value"),
        ({"n": 129}, "n", "invalid_value"),
        ({"n": 100}, "n", "invalid_value"),
        ({"max_tokens": 0}, "max_tokens", "invalid_value"),
        ({"max_tokens": 10**30}, "max_tokens", "invalid_value"),
        ({"max_tokens": 4, "max_completion_tokens": 5}, "max_completion_tokens", "invalid_value"),
        ({"stop": 3}, "stop", "invalid_type"),
        ({"stop": ["a", 3]}, "stop", "invalid_type"),
        ({"stop": ""}, "stop", "invalid_value"),
        ({"stop": ["x"] * 17}, "stop", "invalid_value"),
        ({"stop": "x" * 1025}, "stop", "invalid_value"),
        ({"logit_bias": [1]}, "logit_bias", "invalid_type"),
        ({"logit_bias": {"x": 1}}, "logit_bias", "invalid_value"),
        ({"logit_bias": {"-1": 1}}, "logit_bias", "invalid_value"),
        ({"logit_bias": {"257": 1}}, "logit_bias", "invalid_value"),
        ({"logit_bias": {"9" * 400: 1}}, "logit_bias", "invalid_value"),
        ({"logit_bias": {"1": "x"}}, "logit_bias.1", "invalid_type"),
        ({"logit_bias": {"1": 101}}, "logit_bias", "invalid_value"),
        ({"logprobs": 3}, "logprobs", "invalid_type"),
        ({"top_logprobs": 3}, "top_logprobs", "invalid_value"),
        ({"logprobs": True, "top_logprobs": 21}, "top_logprobs", "invalid_value"),
        ({"stream": "yes"}, "stream", "invalid_type"),
        ({"stream_options": []}, "stream_options", "invalid_type"),
        ({"stream_options": {"include_usage": 1}}, "stream_options.include_usage", "invalid_type"),
        ({"chat_template_kwargs": []}, "chat_template_kwargs", "invalid_type"),
        ({"model": 3}, "model", "invalid_type"),
    ],
)
def test_invalid_field_is_refused_by_name(client: Asked, fields: dict[str, Any], param: str, code: str | None) -> None:
    """Codes inside messages are the business of ``text/messages.py``."""
    response = client.post(CHAT, json=hello(**fields))
    assert response.status_code == 400
    error = error_of(response)
    assert (error["type"], error["param"], error["code"]) == ("invalid_request_error", param, code or error["code"])
    assert len(error["message"]) < 1100


def test_unknown_model_is_404_and_names_what_is_served() -> None:
    with asking() as client:
        response = client.post(CHAT, json=hello(model="gpt-9" * 100_000))
    assert response.status_code == 404
    error = error_of(response)
    assert (error["param"], error["code"]) == ("model", "model_not_found")
    assert "fake" in error["message"]
    assert len(error["message"]) < 400


@pytest.mark.parametrize("stream", [False, True])
def test_context_overflow_is_400_in_the_words_clients_look_for(stream: bool) -> None:
    with asking(FakeEngine(context_tokens=30)) as client:
        response = client.post(CHAT, json=hello(max_tokens=11, stream=stream))
    assert response.status_code == 400
    error = error_of(response)
    assert error["code"] == "context_length_exceeded"
    assert error["message"].startswith("This model's maximum context length is 30 tokens")
    assert "20 tokens" in error["message"]
    assert "11 more" in error["message"]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("failed", "status", "code"),
    [
        (Failed(kind="RequestError", message="m", param="stop", code="odd"), 400, "odd"),
        (Failed(kind="Busy", message="m", retry_after_s=2.3), 429, "busy"),
        (Failed(kind="NotReady", message="m"), 503, "not_ready"),
        (Failed(kind="Cancelled", message="m"), 503, "cancelled"),
        (Failed(kind="DeviceError", message="m"), 500, "device_error"),
        (Failed(kind="OutOfMemory", message="m"), 500, "out_of_memory"),
        (Failed(kind="NeverHeardOf", message="m"), 500, "internal_error"),
    ],
)
def test_failure_before_the_first_token_decides_the_status(
    failed: Failed, status: int, code: str, stream: bool
) -> None:
    """Prefill(num_done=0) comes before it: the status must not be decided by that event."""
    with asking(FakeEngine(FakeAnswer(failure=failed))) as client:
        response = client.post(CHAT, json=hello(stream=stream))
    assert response.status_code == status
    error = error_of(response)
    assert (error["message"], error["param"], error["code"]) == ("m", failed.param, code)
    assert response.headers.get("retry-after") == {429: "3", 503: "1"}.get(status)


def test_failure_after_the_stream_began_is_a_record_and_ends_it_without_done() -> None:
    answer = FakeAnswer(text="Hello", failure=Failed(kind="DeviceError", message="it broke"), fail_at=2)
    with asking(FakeEngine(answer)) as client:
        response = client.post(CHAT, json=hello(stream=True))
    assert response.status_code == 200
    *_, before, last = [line for line in response.text.splitlines() if line]
    assert '"content":"e"' in before
    assert last.startswith('data: {"error":{"message":"it broke","type":"server_error"')


def test_failure_after_the_first_token_of_a_whole_answer_is_a_status() -> None:
    answer = FakeAnswer(text="Hello", failure=Failed(kind="DeviceError", message="it broke"), fail_at=2)
    with asking(FakeEngine(answer)) as client:
        assert client.post(CHAT, json=hello()).status_code == 500


def test_failure_of_one_choice_fails_the_request_and_cancels_the_others() -> None:
    def second_fails(request: Any) -> FakeAnswer:
        failed = Failed(kind="DeviceError", message="row lost") if request.request_id.endswith("-1") else None
        return FakeAnswer(text="x" * 3000, failure=failed, fail_at=5)

    engine = FakeEngine(second_fails, step_s=0.001)
    with asking(engine) as client:
        assert client.post(CHAT, json=hello(n=3)).status_code == 500
        assert len(engine.cancelled) == 2
        assert client.run(engine.status()).num_running == 0


def test_queued_stream_has_begun_and_later_errors_are_records() -> None:
    failing = FakeAnswer(text="x" * 200, failure=Failed(kind="DeviceError", message="late"), fail_at=100)
    engine = FakeEngine(failing, max_rows=1, step_s=0.001)
    with asking(engine) as client:
        response = client.post(CHAT, json=hello(n=2, stream=True))
    assert response.status_code == 200
    assert '"message":"late"' in response.text
    assert "[DONE]" not in response.text


def test_full_queue_is_429_with_retry_after() -> None:
    engine = FakeEngine(FakeAnswer(text="x" * 500), max_rows=1, max_waiting=1, step_s=0.002)
    with (
        serving(engine) as (_, client),
        client.stream("POST", CHAT, json=hello(stream=True)) as first,
        client.stream("POST", CHAT, json=hello(stream=True)) as second,
    ):
        assert (first.status_code, second.status_code) == (200, 200)
        refused = client.post(CHAT, json=hello())
    assert refused.status_code == 429
    assert refused.headers["retry-after"] == "1"
    assert error_of(refused)["type"] == "rate_limit_error"


def test_loading_engine_is_503_with_retry_after_until_it_is_ready() -> None:
    engine = FakeEngine(ready=False)
    with asking(engine) as client:
        refused = client.post(CHAT, json=hello())
        engine.become_ready()
        assert client.post(CHAT, json=hello()).status_code == 200
    assert refused.status_code == 503
    assert refused.headers["retry-after"] == "2"


def test_failed_engine_is_500_and_not_worth_a_retry_when_loading_failed() -> None:
    engine = FakeEngine()
    engine.fail(ModelLoadError("bad magic", path="m.gguf"))
    with asking(engine) as client:
        refused = client.post(CHAT, json=hello())
    assert refused.status_code == 500
    assert refused.headers["x-should-retry"] == "false"
    assert "m.gguf" in error_of(refused)["message"]


def test_bug_in_an_engine_is_500_without_its_details_and_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    def broken(request: Any) -> FakeAnswer:
        raise ZeroDivisionError("secret")

    with asking(FakeEngine(broken)) as client:
        response = client.post(CHAT, json=hello())
        assert client.get("/health").status_code == 200
    assert response.status_code == 500
    assert error_of(response)["code"] == "internal_error"
    assert "secret" not in response.text
    assert any(record.exc_info and "secret" in str(record.exc_info[1]) for record in caplog.records)


def test_bug_after_the_stream_began_is_a_record(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("troth.serve.openai_chat.ChatReply.segment", lambda *arguments: 1 // 0)
    with asking() as client:
        response = client.post(CHAT, json=hello(stream=True))
    assert response.status_code == 200
    assert '"code":"internal_error"' in response.text
    assert "division" not in response.text
    assert "a stream failed" in caplog.text


def test_every_error_class_has_a_row_of_its_own() -> None:
    """A class added to the tree must be given a status here, not fall to the one of its parent unseen."""
    classes = [cls for _, cls in inspect.getmembers(troth.errors, inspect.isclass) if issubclass(cls, TrothError)]
    assert {cls.__name__ for cls in classes} == set(_TABLE)


@pytest.mark.parametrize(
    "error", [DeviceError("it broke"), EngineFailure(Failed(kind="DeviceError", message="it broke"))]
)
def test_error_raised_and_error_from_an_engine_look_alike(error: TrothError) -> None:
    response = error_response(error)
    assert response.status_code == 500
    assert json.loads(response.body) == {
        "error": {"message": "it broke", "type": "server_error", "param": None, "code": "device_error"}
    }
