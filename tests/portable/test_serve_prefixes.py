"""/v1/cache/prefixes: prefixes computed before anybody asks, pinned by name, listed and removed."""

from __future__ import annotations

from typing import Any

import pytest

from tests.portable.serving import Asked, asking, error_of
from troth.testing.fake_engine import FakeEngine
from troth.testing.fake_server import byte_model

PREFIXES = "/v1/cache/prefixes"
SYSTEM = {"role": "system", "content": "You are a careful assistant."}
TURN = [SYSTEM, {"role": "user", "content": "What is the capital of France?"}]


def pinned(client: Asked) -> list[dict[str, Any]]:
    return list(client.get(PREFIXES).json()["data"])


def test_prefix_of_messages_is_what_every_next_turn_begins_with() -> None:
    engine = FakeEngine()
    with asking(engine) as client:
        reply = client.post(PREFIXES, json={"id": "paris", "messages": TURN}).json()
        client.post("/v1/chat/completions", json={"messages": TURN})
    warmed, asked = engine.requests
    assert warmed.pin == "paris"
    assert warmed.prompt_ids == asked.prompt_ids[: asked.boundary]
    assert (warmed.max_tokens, warmed.boundary, asked.pin) == (1, len(warmed.prompt_ids), None)
    num_tokens = len(warmed.prompt_ids)
    assert reply == {
        "id": "paris",
        "object": "prefix",
        "model": "fake",
        "tokens": num_tokens // 16 * 16,
        "bytes": num_tokens // 16 * 16,
        "prompt_tokens": num_tokens,
        "cached_tokens": 0,
    }


def test_prefix_of_a_system_prompt_ends_where_users_differ() -> None:
    engine = FakeEngine()
    with asking(engine) as client:
        client.post(PREFIXES, json={"messages": [SYSTEM]})
    assert bytes(engine.requests[0].prompt_ids).decode() == f"system: {SYSTEM['content']}\nuser: "


def test_prefix_of_a_text_is_the_text() -> None:
    engine = FakeEngine()
    with asking(engine) as client:
        assert client.post(PREFIXES, json={"prompt": "def fibonacci(n):"}).json()["tokens"] == 16
    assert bytes(engine.requests[0].prompt_ids) == b"def fibonacci(n):"


def test_prefix_without_an_id_is_named_after_its_tokens() -> None:
    with asking() as client:
        names = [client.post(PREFIXES, json={"messages": TURN}).json()["id"] for _ in range(2)]
        assert names[0] == names[1]
        assert [pin["id"] for pin in pinned(client)] == names[:1]


def test_prefixes_are_listed_in_order_and_removed_by_id() -> None:
    with asking() as client:
        for name in ("one", "with/slash"):
            client.post(PREFIXES, json={"id": name, "messages": TURN})
        assert [(pin["id"], pin["model"]) for pin in pinned(client)] == [("one", "fake"), ("with/slash", "fake")]
        removed = client.run(client.http.delete(f"{PREFIXES}/with/slash"))
        assert removed.json() == {"id": "with/slash", "object": "prefix", "deleted": True}
        assert [pin["id"] for pin in pinned(client)] == ["one"]
        again = client.run(client.http.delete(f"{PREFIXES}/with/slash"))
    assert (again.status_code, error_of(again)["code"]) == (404, "prefix_not_found")


def test_prefix_is_removed_from_every_model_that_has_it() -> None:
    with asking([byte_model(FakeEngine(), name=name) for name in ("a", "b")]) as client:
        for name in ("a", "b"):
            client.post(PREFIXES, json={"id": "both", "model": name, "messages": TURN})
        assert [pin["model"] for pin in pinned(client)] == ["a", "b"]
        client.run(client.http.delete(f"{PREFIXES}/both"))
        assert pinned(client) == []


@pytest.mark.parametrize(
    ("body", "code", "param", "said"),
    [
        ({}, "missing_required_parameter", "messages", "messages"),
        ({"prompt": "x" * 20, "messages": TURN}, "invalid_value", "prompt", "not of both"),
        ({"prompt": 3}, "invalid_type", "prompt", "a string"),
        ({"prompt": "x" * 20, "id": ""}, None, None, ""),
        ({"prompt": "x" * 20, "id": "a\nb"}, "invalid_value", "pin", "printable"),
        ({"prompt": "x" * 20, "ttl": 3}, "invalid_value", "ttl", "no field of a prefix"),
        ({"prompt": "x" * 15}, "nothing_to_pin", "pin", "15 tokens"),
        ({"prompt": "x" * 200}, "context_length_exceeded", "prompt", "100 tokens"),
        ({"messages": [{"role": "nobody"}]}, "invalid_value", "messages[0].role", "role"),
    ],
)
def test_prefix_that_cannot_be_is_refused_by_name(body: dict[str, Any], code: str, param: str, said: str) -> None:
    with asking(FakeEngine(context_tokens=100)) as client:
        response = client.post(PREFIXES, json=body)
        if code is None:
            assert response.status_code == 200, "an empty id names nothing: the prefix names itself"
            return
        assert pinned(client) == []
    assert response.status_code == 400
    error = error_of(response)
    assert (error["code"], error["param"]) == (code, param)
    assert said in error["message"]


def test_prefix_waits_for_an_engine_that_loads() -> None:
    with asking(FakeEngine(ready=False)) as client:
        assert client.post(PREFIXES, json={"messages": TURN}).status_code == 503
