"""Routes that describe the server, and the tokenizer routes."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest

from tests.portable.serving import CHAT, asking, error_of, hello
from troth.contracts.capabilities import TemplateCapabilities
from troth.contracts.ports import EngineStatus
from troth.contracts.speculation import SpeculationStats
from troth.errors import DeviceError, NotReady
from troth.testing.fake_engine import FakeAnswer, FakeEngine
from troth.testing.fake_server import byte_model


def test_landing_page_names_model_and_api() -> None:
    with asking() as client:
        response = client.get("/")
    assert response.headers["content-type"].startswith("text/plain")
    assert "fake" in response.text
    assert CHAT in response.text


def test_models_have_what_clients_read() -> None:
    expected = {
        "id": "fake",
        "object": "model",
        "created": 0,
        "owned_by": "troth",
        "context_length": 512,
        "max_model_len": 512,
    }
    with asking(FakeEngine(context_tokens=512)) as client:
        assert client.get("/v1/models").json() == {"object": "list", "data": [expected]}
        assert client.get("/v1/models/fake").json() == expected


def test_models_that_load_are_listed_without_a_context() -> None:
    with asking(FakeEngine(ready=False)) as client:
        (model,) = client.get("/v1/models").json()["data"]
    assert model["id"] == "fake"
    assert "context_length" not in model


@pytest.mark.parametrize("name", ["gpt-4", "org/model", ""])
def test_model_that_is_not_served_is_404(name: str) -> None:
    with asking() as client:
        response = client.get(f"/v1/models/{name}")
    assert response.status_code == 404
    assert error_of(response)["code"] == "model_not_found"


def test_alias_reaches_the_served_model() -> None:
    with asking(model_aliases=(("gpt-4o", "fake"), ("org/small", "fake"))) as client:
        assert client.get("/v1/models/org/small").json()["id"] == "fake"
        assert client.post(CHAT, json=hello(model="gpt-4o")).json()["model"] == "fake"


def test_health_follows_the_engine() -> None:
    engine = FakeEngine(ready=False)
    with asking(engine) as client:
        loading = client.get("/health")
        engine.become_ready()
        ready = client.get("/health")
        engine.fail(DeviceError("gone"))
        failed = client.get("/health")
    assert (loading.status_code, loading.json()) == (503, {"status": "loading", "models": {"fake": "loading"}})
    assert "retry-after" in loading.headers
    assert (ready.status_code, ready.json()) == (200, {"status": "ok"})
    assert (failed.status_code, failed.json()["status"]) == (503, "failed")


def test_health_names_an_engine_whose_process_hangs() -> None:
    """It was ok."""

    class Hanging(FakeEngine):
        async def status(self) -> None:  # type: ignore[override]
            raise NotReady("no sign of life")

    with asking(Hanging(ready=False)) as client:
        health = client.get("/health")
        (engine,) = client.get("/v1/status").json()["engines"]
    assert (health.status_code, health.json()) == (
        503,
        {"status": "unresponsive", "models": {"fake": "unresponsive"}},
    )
    assert (engine["state"], engine["status"]["state"]) == ("unresponsive", "unresponsive")


def test_status_shows_engine_plan_and_counts() -> None:
    with asking(FakeEngine(FakeAnswer(text="abc", num_cached_tokens=4))) as client:
        client.post(CHAT, json=hello())
        body = client.get("/v1/status").json()
    assert body["uptime_s"] >= 0
    assert body["generations_running"] == 0
    (engine,) = body["engines"]
    assert (engine["model"], engine["state"]) == ("fake", "ready")
    assert engine["info"]["context_tokens"] == 8192
    assert engine["info"]["plan"]["fits"] is True
    assert engine["status"]["num_requests_by_end"] == {"stop": 1}
    assert engine["status"]["num_completion_tokens"] == 4
    assert engine["status"]["blocks_free"] == [8]
    assert engine["status"]["downgrades"] == []


def test_status_counts_what_the_object_caches_served() -> None:
    asked = {"type": "json_object"}
    with asking(FakeEngine("{}")) as client:
        for _ in range(3):
            client.post(CHAT, json=hello(response_format=asked))
        (engine,) = client.get("/v1/status").json()["engines"]
    grammars = engine["objects"]["grammars"]
    assert (grammars["num_objects"], grammars["num_misses"]) == (1, 1)
    assert grammars["num_hits"] >= 2
    assert 0 < grammars["num_bytes"] <= grammars["max_bytes"]


def test_status_of_a_loading_engine_says_why_it_has_no_plan() -> None:
    with asking(FakeEngine(ready=False)) as client:
        (engine,) = client.get("/v1/status").json()["engines"]
    assert (engine["state"], engine["info"]) == ("loading", None)
    assert engine["error"]["code"] == "not_ready"
    assert engine["status"]["state"] == "loading"


def test_status_and_metrics_survive_an_engine_that_does_not_answer() -> None:
    class Deaf(FakeEngine):
        async def status(self) -> None:  # type: ignore[override]
            raise DeviceError("no answer")

    with asking(Deaf()) as client:
        (engine,) = client.get("/v1/status").json()["engines"]
        metrics = client.get("/metrics")
    assert engine["status"]["state"] == "unresponsive"
    assert "no answer" in engine["status"]["error"]["message"]
    assert metrics.status_code == 200
    assert "troth_engine_ready{" not in metrics.text


def test_metrics_count_responses_tokens_and_times() -> None:
    with asking(FakeEngine(FakeAnswer(text="abc", num_cached_tokens=4))) as client:
        client.post(CHAT, json=hello())
        client.post(CHAT, json=hello(stream=True))
        client.post(CHAT, json={})
        client.get("/nowhere/at/all")
        response = client.get("/metrics")
    assert response.headers["content-type"].startswith("text/plain; version=0.0.4")
    values = dict(re.findall(r"^(\S+?) (\S+)$", response.text, re.MULTILINE))
    expected = {
        'troth_http_responses_total{route="/v1/chat/completions",status="200"}': 2,
        'troth_http_responses_total{route="/v1/chat/completions",status="400"}': 1,
        'troth_http_responses_total{route="none",status="404"}': 1,
        'troth_engine_ready{model="fake"}': 1,
        'troth_engine_requests_running{model="fake"}': 0,
        'troth_engine_prompt_tokens_total{model="fake"}': 40,
        'troth_engine_completion_tokens_total{model="fake"}': 8,
        'troth_engine_cached_tokens_total{model="fake"}': 8,
        'troth_engine_requests_total{end="stop",model="fake"}': 2,
        'troth_engine_blocks{group="0",model="fake",use="free"}': 8,
        'troth_time_to_first_token_seconds_count{model="fake"}': 2,
        'troth_time_per_output_token_seconds_count{model="fake"}': 2,
        "troth_generations_running": 0,
    }
    assert {name: float(values[name]) for name in expected} == expected


def test_metrics_count_drafts_by_source_and_outcome() -> None:
    class Drafting(FakeEngine):
        async def status(self) -> EngineStatus:
            drafts = SpeculationStats(
                num_drafted_by_source={"ngram": 7, "mtp": 3}, num_accepted_by_source={"ngram": 5}, num_verifies=4
            )
            return replace(await super().status(), speculation=drafts)

    with asking(Drafting()) as client:
        text = client.get("/metrics").text
    line = r'^troth_engine_draft_tokens_total{.*outcome="(\w+)",source="(\w+)"} (\S+)$'
    found = re.findall(line, text, re.MULTILINE)
    wanted = {("accepted", "ngram", 5), ("rejected", "ngram", 2), ("accepted", "mtp", 0), ("rejected", "mtp", 3)}
    assert {(outcome, source, float(count)) for outcome, source, count in found} == wanted


def test_tokenize_and_detokenize_are_inverse_and_agree_with_completions() -> None:
    text = "Grüße 世界"
    engine = FakeEngine()
    with asking(engine) as client:
        tokens = client.post("/tokenize", json={"prompt": text}).json()
        back = client.post("/detokenize", json={"tokens": tokens["tokens"]}).json()
        client.post("/v1/completions", json={"prompt": text, "max_tokens": 1})
    assert back == {"prompt": text}
    assert tokens == {"tokens": list(text.encode()), "count": len(text.encode()), "max_model_len": 8192}
    assert list(engine.requests[0].prompt_ids) == tokens["tokens"]


def test_tokenize_renders_messages_as_chat_does() -> None:
    engine = FakeEngine()
    with asking(engine) as client:
        tokens = client.post("/tokenize", json=hello()).json()["tokens"]
        client.post(CHAT, json=hello(max_tokens=1))
    assert list(engine.requests[0].prompt_ids) == tokens


def test_tokenize_counts_tools_as_chat_does_and_refuses_them_where_it_does() -> None:
    able = TemplateCapabilities(chat=True, tool_declarations=True, tool_format="hermes")
    body = hello(tools=[{"type": "function", "function": {"name": "f"}}])
    engine = FakeEngine()
    with asking([byte_model(engine, capabilities=able)]) as client:
        tokens = client.post("/tokenize", json=body).json()["tokens"]
        client.post(CHAT, json={**body, "max_tokens": 1})
        without = client.post("/tokenize", json={**body, "tool_choice": "none"}).json()["tokens"]
    assert list(engine.requests[0].prompt_ids) == tokens
    assert bytes(tokens).startswith(b"tools=f")
    assert not bytes(without).startswith(b"tools=f")
    with asking() as client:
        refused = client.post("/tokenize", json=body)
    assert (refused.status_code, error_of(refused)["code"]) == (400, "capability_unavailable")


def test_tokenize_works_while_the_engine_loads() -> None:
    with asking(FakeEngine(ready=False)) as client:
        response = client.post("/tokenize", json={"prompt": "ab"})
    assert response.json() == {"tokens": [97, 98], "count": 2, "max_model_len": None}


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/tokenize", {}, "prompt"),
        ("/tokenize", {"prompt": 3}, "prompt"),
        ("/tokenize", {"messages": 3}, "messages"),
        ("/detokenize", {}, "tokens"),
        ("/detokenize", {"tokens": "x"}, "tokens"),
        ("/detokenize", {"tokens": ["x"]}, "tokens"),
        ("/detokenize", {"tokens": [-1]}, "tokens"),
        ("/detokenize", {"tokens": [257]}, "tokens"),
        ("/detokenize", {"tokens": [10**30]}, "tokens"),
    ],
)
def test_token_routes_refuse_what_is_no_text_or_token(path: str, body: dict[str, object], param: str) -> None:
    with asking() as client:
        response = client.post(path, json=body)
    assert response.status_code == 400
    assert error_of(response)["param"] == param
