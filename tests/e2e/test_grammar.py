"""Structured output of the demo model: answers parse and match, streamed and whole, alone and sixteen at once."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from tests.e2e.demo_server import DEADLINE_S, NAME, DemoServer
from troth.contracts.grammar import Grammar
from troth.library import Engine

openai = pytest.importorskip("openai")
pytestmark = pytest.mark.e2e

SCHEMA = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "maxLength": 12},
        "size": {"enum": ["small", "large"]},
        "capital": {"type": "boolean"},
    },
    "required": ["city", "size", "capital"],
    "additionalProperties": False,
}
FORMAT = {"type": "json_schema", "json_schema": {"name": "city", "strict": True, "schema": SCHEMA}}
QUESTION = [{"role": "user", "content": "Tell me about Paris, as JSON."}]


@pytest.fixture
def client(server: DemoServer) -> Iterator[Any]:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0, timeout=DEADLINE_S) as client:
        yield client


def chat(client: Any, **fields: Any) -> Any:
    values = {"model": NAME, "messages": QUESTION, "temperature": 0, "max_tokens": 48, "response_format": FORMAT}
    return client.chat.completions.create(**values | fields)


def check(text: str) -> dict[str, Any]:
    """The value of an answer, which must match the schema."""
    value: dict[str, Any] = json.loads(text)
    assert list(value) == ["city", "size", "capital"]
    assert len(value["city"]) <= 12
    assert value["size"] in ("small", "large")
    assert isinstance(value["capital"], bool)
    return value


def test_answer_of_a_schema_streams_what_it_returns_whole(client: Any) -> None:
    whole = chat(client)
    check(whole.choices[0].message.content)
    assert whole.choices[0].finish_reason == "stop"
    chunks = list(chat(client, stream=True))
    text = "".join(one.delta.content or "" for chunk in chunks for one in chunk.choices)
    assert text == whole.choices[0].message.content


def test_choices_and_sixteen_requests_at_once_all_match(client: Any) -> None:
    """Each equal to what it is alone: neighbours under other grammars change nothing."""

    def wanted(index: int) -> dict[str, Any]:
        sampling = {"temperature": 1.0, "seed": index}
        match index % 4:
            case 0:
                return sampling
            case 1:
                return {**sampling, "response_format": None, "extra_body": {"guided_regex": r"[A-Z][a-z]{2,8}\."}}
            case 2:
                return {**sampling, "response_format": None, "extra_body": {"guided_choice": ["yes", "no", "no way"]}}
        return {**sampling, "response_format": None, "max_tokens": 12}

    def text(index: int) -> str:
        return str(chat(client, **wanted(index)).choices[0].message.content)

    with ThreadPoolExecutor(16) as pool:
        together = list(pool.map(text, range(16)))
    for index, answer in enumerate(together):
        match index % 4:
            case 0:
                check(answer)
            case 1:
                assert re.fullmatch(r"[A-Z][a-z]{2,8}\.", answer)
            case 2:
                assert answer in ("yes", "no", "no way")
    assert [text(index) for index in range(4)] == together[:4]
    choices = chat(client, n=3, temperature=1.0, seed=5).choices
    assert len([check(choice.message.content) for choice in choices]) == 3


def test_answer_that_is_cut_says_so(client: Any) -> None:
    (choice,) = chat(client, max_tokens=5).choices
    assert choice.finish_reason == "length"
    with pytest.raises(ValueError, match=r"Expecting|Unterminated"):
        json.loads(choice.message.content)
    (choice,) = chat(client, stop=['"size"']).choices
    assert choice.finish_reason == "stop"
    assert choice.message.content.rstrip().endswith(",")


def test_answer_parses_into_the_clients_own_types(client: Any) -> None:
    pydantic = pytest.importorskip("pydantic")
    city = pydantic.create_model("City", city=(str, ...), capital=(bool, ...))
    parsed = client.chat.completions.parse(
        model=NAME, messages=QUESTION, temperature=0, max_tokens=60, response_format=city
    )
    assert isinstance(parsed.choices[0].message.parsed, city)


def test_schema_that_cannot_be_followed_is_refused_with_its_pointer(client: Any) -> None:
    schema = {"type": "object", "properties": {"a": {"type": "string", "pattern": "(a"}}}
    with pytest.raises(openai.BadRequestError) as caught:
        chat(client, response_format={"type": "json_schema", "json_schema": {"name": "x", "schema": schema}})
    assert (caught.value.code, caught.value.param) == ("invalid_schema", "response_format.json_schema.schema")
    assert "#/properties/a" in caught.value.message


def test_engine_answers_under_a_grammar(engine: Engine) -> None:
    reply = engine.chat("Is Paris in France?", grammar=Grammar(kind="choice", choices=("Yes.", "No.")), temperature=0)
    assert reply.text in ("Yes.", "No.")
    assert reply.finish_reason == "stop"
    value = json.loads(engine.chat("Paris as JSON.", response_format=FORMAT, temperature=0, max_tokens=48).text)
    assert set(value) == set(SCHEMA["required"])
    asked = engine.chat("Count.", grammar=Grammar(kind="regex", source="1, 2, 3"), ignore_eos=True)
    assert (asked.text, asked.finish_reason) == ("1, 2, 3", "stop")
