"""The public OpenAI client against the server, over a fake engine: what it parses, raises and retries."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import httpx
import pytest

from troth.config.options import ServeOptions
from troth.contracts.events import Failed
from troth.contracts.request import Request
from troth.testing.fake_engine import FakeAnswer, FakeEngine
from troth.testing.fake_server import FakeServer

openai = pytest.importorskip("openai")

HELLO: Any = [{"role": "user", "content": "hi"}]


@contextmanager
def client_of(engine: FakeEngine, *, api_key: str = "anything", retries: int = 0, **options: Any) -> Iterator[Any]:
    with (
        FakeServer(engine, ServeOptions(port=0, **options)) as server,
        openai.OpenAI(base_url=f"{server.url}/v1", api_key=api_key, max_retries=retries) as client,
    ):
        yield client


def test_openai_client_lists_and_retrieves_models() -> None:
    with client_of(FakeEngine(context_tokens=512)) as client:
        (model,) = client.models.list().data
        assert client.models.retrieve("fake") == model
        assert (model.id, model.object, model.owned_by) == ("fake", "model", "troth")
        assert model.context_length == 512
        with pytest.raises(openai.NotFoundError) as raised:
            client.models.retrieve("gpt-9")
    assert raised.value.code == "model_not_found"


def test_openai_client_reads_a_whole_chat() -> None:
    with client_of(FakeEngine(FakeAnswer(text="Grüße", reasoning="hm", num_cached_tokens=3))) as client:
        raw = client.chat.completions.with_raw_response.create(model="fake", messages=HELLO, seed=4)
    chat = raw.parse()
    (choice,) = chat.choices
    assert (choice.message.role, choice.message.content, choice.finish_reason) == ("assistant", "Grüße", "stop")
    assert choice.message.reasoning_content == "hm"
    assert chat.usage.prompt_tokens_details.cached_tokens == 3
    assert chat.usage.completion_tokens_details.reasoning_tokens == 2
    assert chat.usage.total_tokens == chat.usage.prompt_tokens + chat.usage.completion_tokens
    assert chat.troth["seed"] == 4
    assert raw.headers["x-request-id"].startswith("req-")


def test_openai_client_streams_a_chat_with_usage_and_keep_alives() -> None:
    engine = FakeEngine(FakeAnswer(text="Grüße an alle", chunk_tokens=5), step_s=0.02)
    with client_of(engine, keepalive_s=0.01) as client:
        stream = client.chat.completions.create(
            model="fake", messages=HELLO, n=2, stream=True, stream_options={"include_usage": True}
        )
        chunks = list(stream)
    texts = {0: "", 1: ""}
    for chunk in chunks:
        for choice in chunk.choices:
            texts[choice.index] += choice.delta.content or ""
    assert texts == {0: "Grüße an alle", 1: "Grüße an alle"}
    assert chunks[-1].choices == []
    assert chunks[-1].usage.completion_tokens == 2 * (len("Grüße an alle".encode()) + 1)
    assert all(chunk.usage is None for chunk in chunks[:-1])


def test_openai_client_stream_helper_accumulates_the_final_message() -> None:
    with (
        client_of(FakeEngine("Hello there.")) as client,
        client.chat.completions.stream(model="fake", messages=HELLO, logprobs=True, top_logprobs=1) as stream,
    ):
        contents = [event.content for event in stream if event.type == "content.done"]
        final = stream.get_final_completion()
    assert contents == ["Hello there."]
    assert final.choices[0].message.content == "Hello there."
    assert final.choices[0].finish_reason == "stop"
    assert len(final.choices[0].logprobs.content) == len("Hello there.") + 1


def test_openai_client_reads_completions_whole_and_streamed() -> None:
    with client_of(FakeEngine("x€")) as client:
        whole = client.completions.create(model="fake", prompt=["a", "b"], logprobs=1, echo=True)
        stream = client.completions.create(model="fake", prompt=[97, 98], stream=True, logprobs=2)
        text = "".join(chunk.choices[0].text for chunk in stream)
    assert [choice.text for choice in whole.choices] == ["ax€", "bx€"]
    assert whole.choices[0].logprobs.text_offset == [0, 1, 2, 2, 2, 3]
    assert whole.choices[0].logprobs.token_logprobs[0] is None
    assert text == "x€"


@pytest.mark.parametrize(
    ("failed", "error"),
    [
        (Failed(kind="RequestError", message="m", code="c"), "BadRequestError"),
        (Failed(kind="UnknownModel", message="m", code="c"), "NotFoundError"),
        (Failed(kind="Busy", message="m"), "RateLimitError"),
        (Failed(kind="DeviceError", message="m"), "InternalServerError"),
        (Failed(kind="NotReady", message="m"), "InternalServerError"),
    ],
)
@pytest.mark.parametrize("stream", [True, False])
def test_openai_client_raises_the_error_that_fits(failed: Failed, error: str, stream: bool) -> None:
    with client_of(FakeEngine(FakeAnswer(failure=failed))) as client, pytest.raises(getattr(openai, error)) as raised:
        client.chat.completions.create(model="fake", messages=HELLO, stream=stream)
    assert raised.value.body["message"] == "m"


def test_openai_client_raises_an_error_that_comes_inside_a_stream() -> None:
    answer = FakeAnswer(text="Hello", failure=Failed(kind="DeviceError", message="it broke"), fail_at=3)
    with client_of(FakeEngine(answer)) as client:
        stream = client.chat.completions.create(model="fake", messages=HELLO, stream=True)
        got = []
        with pytest.raises(openai.APIError, match="it broke"):
            got.extend(chunk.choices[0].delta.content for chunk in stream)
    assert len(engine_text(got)) <= 3


def test_openai_client_retries_a_busy_server_until_it_has_room() -> None:
    busy = iter([Failed(kind="Busy", message="full", retry_after_s=0.01), None])

    def script(request: Request) -> FakeAnswer:
        return FakeAnswer(text="now", failure=next(busy))

    with client_of(FakeEngine(script), retries=1) as client:
        chat = client.chat.completions.create(model="fake", messages=HELLO)
    assert chat.choices[0].message.content == "now"


def test_openai_client_does_not_retry_what_can_never_fit() -> None:
    with client_of(FakeEngine(context_tokens=30), retries=3) as client:
        with pytest.raises(openai.BadRequestError) as raised:
            client.chat.completions.create(model="fake", messages=HELLO, max_tokens=100)
        metrics = httpx.get(str(client.base_url).replace("/v1/", "/metrics"), trust_env=False).text
    assert (raised.value.code, raised.value.param) == ("context_length_exceeded", "max_tokens")
    assert 'troth_http_responses_total{route="/v1/chat/completions",status="400"} 1.0' in metrics


def test_openai_client_needs_the_key_when_there_is_one() -> None:
    with client_of(FakeEngine(), api_key="right", api_keys=("right",)) as client:
        assert client.chat.completions.create(model="fake", messages=HELLO).choices
    with (
        client_of(FakeEngine(), api_key="wrong", api_keys=("right",)) as client,
        pytest.raises(openai.AuthenticationError),
    ):
        client.models.list()


def test_openai_client_that_closes_its_stream_cancels_the_request() -> None:
    engine = FakeEngine("word ", step_s=0.005)
    with client_of(engine) as client:
        stream = client.chat.completions.create(
            model="fake", messages=HELLO, stream=True, extra_body={"ignore_eos": True}
        )
        for _, chunk in zip(range(5), stream, strict=False):
            assert chunk.id.startswith("chatcmpl-")
        stream.close()
        client.close()
    assert [reason for _, reason in engine.cancelled] == ["disconnected"]


def test_openai_async_client_runs_many_requests_at_once() -> None:
    engine = FakeEngine(lambda request: FakeAnswer(text=str(request.sampling.seed)), max_rows=16)

    async def ask(url: str) -> list[str]:
        async with openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="x") as client:
            chats = await asyncio.gather(
                *(client.chat.completions.create(model="fake", messages=HELLO, seed=seed) for seed in range(40))
            )
        return [chat.choices[0].message.content for chat in chats]

    with FakeServer(engine) as server:
        assert asyncio.run(ask(server.url)) == [str(seed) for seed in range(40)]


def engine_text(pieces: list[str | None]) -> str:
    """The pieces as one text."""
    return "".join(piece or "" for piece in pieces)
