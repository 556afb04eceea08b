"""The public OpenAI client against ``troth serve`` with the demo model: answers streamed and whole, and errors."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any

import pytest

from tests.e2e.demo_server import CONTEXT, DEADLINE_S, MAX_ROWS, MAX_WAITING, NAME, QUESTION, DemoServer

openai = pytest.importorskip("openai")
pytestmark = pytest.mark.e2e

ANSWER = "The capital of France is Paris."
PROMPT = "The capital of France is"


@pytest.fixture
def client(server: DemoServer) -> Iterator[Any]:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0, timeout=DEADLINE_S) as client:
        yield client


def chat(client: Any, **fields: Any) -> Any:
    return client.chat.completions.create(**{"model": NAME, "messages": QUESTION, "temperature": 0} | fields)


def complete(client: Any, **fields: Any) -> Any:
    return client.completions.create(**{"model": NAME, "prompt": PROMPT, "temperature": 0, "max_tokens": 6} | fields)


def contents(chunks: list[Any], choice: int = 0) -> str:
    """The text of one choice of a chat stream."""
    mine = (one for chunk in chunks for one in chunk.choices if one.index == choice)
    return "".join(one.delta.content or "" for one in mine)


def finish_reasons(chunks: list[Any]) -> dict[int, str]:
    """Choice -> finish reason; each choice may give one only."""
    found = [(one.index, one.finish_reason) for chunk in chunks for one in chunk.choices if one.finish_reason]
    assert len(found) == len(dict(found))
    return dict(found)


def test_models_are_listed_and_found_by_name_and_alias(client: Any) -> None:
    (model,) = client.models.list().data
    assert (model.id, model.object, model.owned_by, model.context_length) == (NAME, "model", "troth", CONTEXT)
    assert client.models.retrieve(NAME) == client.models.retrieve("gpt-demo") == model
    with pytest.raises(openai.NotFoundError) as raised:
        client.models.retrieve("gpt-9")
    assert (raised.value.code, raised.value.param) == ("model_not_found", "model")


def uncached(usage: Any) -> Any:
    """Counts that do not depend on what was asked before."""
    return usage.model_copy(update={"prompt_tokens_details": None})


def test_chat_streams_what_it_returns_whole(client: Any) -> None:
    whole = chat(client, max_tokens=20)
    (choice,) = whole.choices
    assert choice.message.role == "assistant"
    assert choice.message.content.startswith(ANSWER)
    usage = whole.usage
    assert usage.total_tokens == usage.prompt_tokens + usage.completion_tokens
    assert (choice.finish_reason == "length") == (usage.completion_tokens == 20)

    chunks = list(chat(client, max_tokens=20, stream=True, stream_options={"include_usage": True}))
    assert contents(chunks) == choice.message.content
    assert finish_reasons(chunks) == {0: choice.finish_reason}
    assert chunks[0].choices[0].delta.role == "assistant"
    *before, last = chunks
    assert (last.choices, uncached(last.usage)) == ([], uncached(usage))
    assert all(chunk.usage is None for chunk in before)
    assert {(chunk.object, chunk.model) for chunk in chunks} == {("chat.completion.chunk", NAME)}
    assert len({chunk.id for chunk in chunks}) == 1

    without_usage = list(chat(client, max_tokens=1, stream=True))
    assert all(chunk.usage is None for chunk in without_usage)


def test_completion_streams_what_it_returns_whole(client: Any) -> None:
    whole = complete(client)
    assert whole.choices[0].text.startswith(" Paris")
    assert whole.choices[0].finish_reason == "length"
    assert whole.usage.completion_tokens == 6
    chunks = list(complete(client, stream=True, stream_options={"include_usage": True}))
    assert "".join(one.text for chunk in chunks for one in chunk.choices) == whole.choices[0].text
    assert uncached(chunks[-1].usage) == uncached(whole.usage)
    assert finish_reasons(chunks) == {0: "length"}


def test_completion_of_ids_and_of_several_prompts_equals_that_of_the_text(client: Any, server: DemoServer) -> None:
    ids = server.http.post("/tokenize", json={"prompt": PROMPT}).json()["tokens"]
    text = complete(client, max_tokens=3).choices[0].text
    several = complete(client, prompt=[PROMPT, PROMPT], max_tokens=3)
    assert [choice.text for choice in several.choices] == [text, text]
    assert several.usage.prompt_tokens == 2 * len(ids)
    assert complete(client, prompt=ids, max_tokens=3).choices[0].text == text
    echoed = complete(client, prompt=ids, max_tokens=3, echo=True)
    assert echoed.choices[0].text == PROMPT + text


def test_choices_of_one_request_differ_and_repeat(client: Any) -> None:
    wishes: dict[str, Any] = {"n": 3, "seed": 11, "temperature": 1.0, "max_tokens": 6}
    whole = chat(client, **wishes)
    texts = [choice.message.content for choice in whole.choices]
    assert [choice.index for choice in whole.choices] == [0, 1, 2]
    assert len(set(texts)) > 1
    chunks = list(chat(client, stream=True, stream_options={"include_usage": True}, **wishes))
    assert [contents(chunks, choice) for choice in range(3)] == texts
    assert finish_reasons(chunks) == {choice.index: choice.finish_reason for choice in whole.choices}
    assert uncached(chunks[-1].usage) == uncached(whole.usage)
    # A prompt counts once; the first choice is what a request for one alone gets.
    alone = chat(client, **wishes | {"n": 1})
    assert alone.choices[0].message.content == texts[0]
    assert alone.usage.prompt_tokens == whole.usage.prompt_tokens


def test_seed_repeats_an_answer_and_is_told_when_none_was_given(client: Any) -> None:
    first = chat(client, temperature=1.0, max_tokens=6)
    again = chat(client, temperature=1.0, max_tokens=6, seed=first.troth["seed"])
    assert again.choices[0].message.content == first.choices[0].message.content
    assert again.troth["seed"] == first.troth["seed"]
    others = chat(client, temperature=1.0, max_tokens=6, seed=first.troth["seed"] + 1)
    assert others.troth["seed"] != first.troth["seed"]


@pytest.mark.parametrize("stream", [False, True])
def test_stop_string_ends_the_answer_and_is_not_shown(client: Any, stream: bool) -> None:
    reply = chat(client, max_tokens=20, stop=["Lyon", "ance is P"], stream=stream)
    if stream:
        chunks = list(reply)
        text, reason = contents(chunks), finish_reasons(chunks)[0]
    else:
        text, reason = reply.choices[0].message.content, reply.choices[0].finish_reason
    assert (text, reason) == ("The capital of Fr", "stop")


@pytest.mark.parametrize("field", ["max_tokens", "max_completion_tokens"])
def test_token_limit_cuts_the_answer(client: Any, field: str) -> None:
    reply = chat(client, **{field: 3})
    assert (reply.usage.completion_tokens, reply.choices[0].finish_reason) == (3, "length")
    assert ANSWER.startswith(reply.choices[0].message.content)


def test_answer_that_ends_by_itself_counts_its_end(client: Any) -> None:
    messages = [{"role": "user", "content": "Answer with one word: what is the capital of France?"}]
    reply = chat(client, messages=messages, max_tokens=40, logprobs=True)
    assert reply.choices[0].finish_reason == "stop"
    entries = reply.choices[0].logprobs.content
    assert len(entries) == reply.usage.completion_tokens < 40
    assert entries[-1].token == "<|im_end|>"
    assert "".join(entry.token for entry in entries[:-1]) == reply.choices[0].message.content


def test_chat_logprobs_name_the_tokens_of_the_text(client: Any) -> None:
    wishes: dict[str, Any] = {"max_tokens": 4, "logprobs": True, "top_logprobs": 3}
    (choice,) = chat(client, **wishes).choices
    entries = choice.logprobs.content
    assert len(entries) == 4
    assert bytes(byte for entry in entries for byte in entry.bytes).decode() == choice.message.content
    for entry in entries:
        tops = [top.logprob for top in entry.top_logprobs]
        assert len(tops) == 3
        assert tops == sorted(tops, reverse=True)
        assert entry.logprob <= 0
        # At temperature 0 the token is the likeliest one.
        assert (entry.top_logprobs[0].token, tops[0]) == (entry.token, entry.logprob)
    streamed = [
        entry
        for chunk in chat(client, stream=True, **wishes)
        for one in chunk.choices
        if one.logprobs
        for entry in one.logprobs.content
    ]
    assert [entry.token for entry in streamed] == [entry.token for entry in entries]
    assert [entry.logprob for entry in streamed] == pytest.approx([entry.logprob for entry in entries], abs=1e-3)


def test_completion_logprobs_cover_the_echoed_prompt(client: Any) -> None:
    (choice,) = complete(client, max_tokens=3, logprobs=2, echo=True).choices
    logprobs = choice.logprobs
    assert "".join(logprobs.tokens) == choice.text
    assert choice.text.startswith(PROMPT)
    assert [choice.text[at:].startswith(token) for at, token in zip(logprobs.text_offset, logprobs.tokens, strict=True)]
    assert logprobs.token_logprobs[0] is logprobs.top_logprobs[0] is None
    assert all(value <= 0 for value in logprobs.token_logprobs[1:])
    assert all(2 <= len(top) <= 3 for top in logprobs.top_logprobs[1:])
    # " France" after "The capital of" is likelier than a hundredth.
    assert logprobs.token_logprobs[logprobs.tokens.index(" France")] > -4.6
    (chunk, *_) = [one for one in complete(client, max_tokens=1, logprobs=2, stream=True) if one.choices[0].logprobs]
    assert chunk.choices[0].logprobs.tokens == logprobs.tokens[-3:-2]


def test_errors_are_raised_as_what_they_are(client: Any) -> None:
    with pytest.raises(openai.NotFoundError) as unknown:
        chat(client, model="gpt-9")
    assert (unknown.value.code, unknown.value.param) == ("model_not_found", "model")
    for fields, param, code in [
        ({"messages": []}, "messages", "invalid_value"),
        ({"messages": [{"role": "wizard", "content": "x"}]}, "messages[0].role", "invalid_value"),
        ({"temperature": -1}, "temperature", "invalid_value"),
        ({"max_tokens": CONTEXT}, "max_tokens", "context_length_exceeded"),
        ({"max_tokens": 3, "max_completion_tokens": 4}, "max_completion_tokens", "invalid_value"),
        ({"tools": [{"type": "function", "function": {"name": "f"}}]}, "tools", "capability_unavailable"),
        ({"n": MAX_ROWS + MAX_WAITING + 1}, "n", "invalid_value"),
    ]:
        for stream in (False, True):
            with pytest.raises(openai.BadRequestError) as bad:
                chat(client, stream=stream, **fields)
            assert (bad.value.param, bad.value.code, bad.value.type) == (param, code, "invalid_request_error")
            assert set(bad.value.body) == {"message", "type", "param", "code"}
    with pytest.raises(openai.BadRequestError) as long:
        complete(client, prompt="word " * CONTEXT)
    assert (long.value.param, long.value.code) == ("prompt", "context_length_exceeded")
    assert f"maximum context length is {CONTEXT} tokens" in long.value.message


def test_async_client_streams_and_lists(server: DemoServer) -> None:
    async def ask() -> tuple[list[str], list[Any], Any, str]:
        async with openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="none", timeout=DEADLINE_S) as client:
            models = [model.id async for model in client.models.list()]
            stream = await chat(client, max_tokens=4, stream=True)
            chunks = [chunk async for chunk in stream]
            whole = await chat(client, max_tokens=4)
            pieces = await complete(client, max_tokens=2, stream=True)
            text = "".join([chunk.choices[0].text async for chunk in pieces])
        return models, chunks, whole, text

    models, chunks, whole, text = asyncio.run(ask())
    assert models == [NAME]
    assert contents(chunks) == whole.choices[0].message.content
    assert ANSWER.startswith(contents(chunks))
    assert text == " Paris."


def test_health_status_and_metrics_tell_of_the_engine(server: DemoServer) -> None:
    assert server.http.get("/health").json() == {"status": "ok"}
    before = server.status()
    usage = server.chat(max_tokens=2).json()["usage"]
    after = server.status()
    assert after["num_prompt_tokens"] - before["num_prompt_tokens"] == usage["prompt_tokens"]
    assert after["num_completion_tokens"] - before["num_completion_tokens"] == usage["completion_tokens"] == 2
    assert after["num_requests_by_end"]["length"] == before["num_requests_by_end"].get("length", 0) + 1
    (engine,) = server.http.get("/v1/status").json()["engines"]
    assert engine["info"]["context_tokens"] == CONTEXT
    assert engine["info"]["max_rows"] == MAX_ROWS
    assert engine["info"]["plan"]["fits"] is True
    assert engine["objects"]["token_beginnings"]["max_bytes"] == 2**24
    metrics = server.http.get("/metrics").text.splitlines()
    assert f'troth_engine_ready{{model="{NAME}"}} 1.0' in metrics
    assert f'troth_engine_completion_tokens_total{{model="{NAME}"}} {after["num_completion_tokens"]}.0' in metrics
    assert f'troth_engine_blocks{{group="0",model="{NAME}",use="used"}} 0.0' in metrics
    assert any(
        line.startswith('troth_http_responses_total{route="/v1/chat/completions",status="200"}') for line in metrics
    )


def test_tokenize_counts_what_a_prompt_will_cost(server: DemoServer) -> None:
    counted = server.http.post("/tokenize", json={"messages": QUESTION}).json()
    assert counted["count"] == len(counted["tokens"]) == server.chat().json()["usage"]["prompt_tokens"]
    assert counted["max_model_len"] == CONTEXT
    text = "Grüße, \U0001f600 and NUL \x00!"
    tokens = server.http.post("/tokenize", json={"prompt": text}).json()["tokens"]
    assert server.http.post("/detokenize", json={"tokens": tokens}).json() == {"prompt": text}
