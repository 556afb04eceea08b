"""Orders of events that a well-behaved engine may send, and some that it may not."""

from __future__ import annotations

import json

import pytest

from tests.portable.serving import CHAT, COMPLETIONS, Asked, asking, error_of, hello, records, streamed_text
from troth.contracts.events import Completed, Event, Failed, Prefill, Queued, Segment, Usage
from troth.contracts.request import Request
from troth.runtime.event_queue import EventQueue, QueuedEvents
from troth.testing.fake_engine import FakeEngine
from troth.testing.fake_server import byte_model

DONE = Completed(
    finish_reason="stop", usage=Usage(num_prompt_tokens=20, num_completion_tokens=2, num_cached_tokens=16), seed=1
)
ABORTED = Completed(finish_reason="aborted", usage=Usage(num_prompt_tokens=20, num_completion_tokens=1))
TEXT = Segment(text="a", num_completion_tokens=1)


class Scripted(FakeEngine):
    """Sends exactly these events."""

    def __init__(self, *events: Event) -> None:
        super().__init__()
        self._events = events

    def submit(self, request: Request) -> QueuedEvents:
        queue = EventQueue(request.request_id)
        for event in self._events:
            queue.put(event)
        return queue.stream()


class Breaking(Scripted):
    """Sends its events and then stops without an end."""

    def submit(self, request: Request) -> QueuedEvents:
        stream = super().submit(request)
        stream._queue.ended = True
        return stream


@pytest.mark.parametrize("before", [(), (Prefill(num_done=0, num_cached=0, num_total=20),), (Queued(position=3),)])
def test_stream_may_begin_with_any_event(before: tuple[Event, ...]) -> None:
    with asking(Scripted(*before, TEXT, DONE)) as client:
        response = client.post(CHAT, json=hello(stream=True))
    assert streamed_text(records(response.text)) == "a"


def test_answer_without_any_text_is_an_answer() -> None:
    with asking(Scripted(DONE)) as client:
        stream = records(client.post(CHAT, json=hello(stream=True)).text)
        whole = client.post(CHAT, json=hello()).json()
    assert [one["choices"][0]["delta"] for one in stream] == [{"role": "assistant", "content": ""}, {}]
    assert whole["choices"][0]["message"]["content"] == ""
    assert whole["usage"]["prompt_tokens_details"] == {"cached_tokens": 16}


def test_segments_without_text_send_nothing() -> None:
    with asking(Scripted(Segment(text="", num_completion_tokens=1), TEXT, DONE)) as client:
        stream = records(client.post(CHAT, json=hello(stream=True)).text)
        legacy = records(client.post(COMPLETIONS, json={"prompt": "x", "stream": True}).text)
    assert len(stream) == 3
    assert [one["choices"][0]["text"] for one in legacy] == ["a", ""]


def test_completion_stream_shows_progress_and_usage_on_request() -> None:
    prefill = Prefill(num_done=4, num_cached=0, num_total=20)
    body = {
        "prompt": "x",
        "stream": True,
        "stream_options": {"include_usage": True, "include_progress": True},
    }
    with asking(Scripted(prefill, TEXT, DONE)) as client:
        stream = records(client.post(COMPLETIONS, json=body).text)
    assert stream[0]["troth"]["prefill"] == {"done": 4, "cached": 0, "total": 20, "eta_s": None}
    assert stream[-1]["usage"]["completion_tokens"] == 2
    assert stream[-1]["choices"] == []


def test_reasoning_of_a_completion_is_part_of_its_text() -> None:
    thought = Segment(text="hm ", kind="reasoning", num_completion_tokens=1)
    with asking(Scripted(thought, TEXT, DONE)) as client:
        whole = client.post(COMPLETIONS, json={"prompt": "x"}).json()
        stream = records(client.post(COMPLETIONS, json={"prompt": "x", "stream": True}).text)
    assert whole["choices"][0]["text"] == "hm a"
    assert "".join(one["choices"][0]["text"] for one in stream) == "hm a"


@pytest.mark.parametrize("stream", [True, False])
def test_answer_that_somebody_else_stopped_is_an_error_not_a_finish(stream: bool) -> None:
    with asking(Scripted(TEXT, ABORTED)) as client:
        response = client.post(CHAT, json=hello(stream=stream))
    assert 'finish_reason":"' not in response.text
    if stream:
        last = response.text.strip().splitlines()[-1]
        assert json.loads(last.removeprefix("data: "))["error"]["code"] == "cancelled"
    else:
        assert (response.status_code, error_of(response)["code"]) == (503, "cancelled")


@pytest.mark.parametrize("stream", [True, False])
def test_stream_that_stops_without_an_end_is_an_internal_error(stream: bool) -> None:
    with asking(Breaking(TEXT)) as client:
        response = client.post(CHAT, json=hello(stream=stream))
    assert '"code":"internal_error"' in response.text
    assert "[DONE]" not in response.text
    assert response.status_code == (200 if stream else 500)


def test_tool_call_segment_is_not_shown_as_text() -> None:
    """Its call is, by events of its own."""
    with asking(Scripted(Segment(text="{", kind="tool_call"), DONE)) as client:
        stream = records(client.post(CHAT, json=hello(stream=True)).text)
        whole = client.post(CHAT, json=hello()).json()
    assert not any(choice["delta"].get("content") for record in stream for choice in record["choices"])
    assert whole["choices"][0]["message"]["content"] == ""


def test_failure_with_everything_set_reaches_the_client_whole() -> None:
    failed = Failed(kind="CapabilityUnavailable", message="no", param="stop", code="capability_unavailable")
    with asking(Scripted(failed)) as client:
        error = error_of(client.post(CHAT, json=hello(stream=True)))
    assert error == {
        "message": "no",
        "type": "invalid_request_error",
        "param": "stop",
        "code": "capability_unavailable",
    }


def test_two_models_are_told_apart_and_must_be_named() -> None:
    models = [byte_model(FakeEngine(name), name=name) for name in ("one", "two")]
    with asking(models) as client:
        assert [model["id"] for model in client.get("/v1/models").json()["data"]] == ["one", "two"]
        assert _content(client, model="two") == "two"
        assert _content(client, model="one") == "one"
        unnamed = client.post(CHAT, json=hello())
    assert unnamed.status_code == 400
    assert error_of(unnamed)["param"] == "model"
    assert "one, two" in error_of(unnamed)["message"]


def _content(client: Asked, **fields: object) -> str:
    return str(client.post(CHAT, json=hello(**fields)).json()["choices"][0]["message"]["content"])
