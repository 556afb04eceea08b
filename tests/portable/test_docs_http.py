"""docs/http.md says what ``serve/`` does: routes, fields and their bounds, reply shapes, limits, statuses, metrics."""

from __future__ import annotations

import ast
import asyncio
import dataclasses
import json
import re
from collections.abc import Callable
from typing import Any

import httpx
import pytest
from starlette.applications import Starlette
from starlette.routing import Route

from tests.markdown import ROOT, Document, Row, code, codes
from tests.portable.serving import CHAT, COMPLETIONS, asking, error_of, hello, records
from troth.config.options import EngineOptions, ServeOptions
from troth.contracts.ports import EngineStatus
from troth.contracts.prefix_cache import DiskCacheStatus, PrefixCacheStatus
from troth.contracts.sampling import MAX_LOGIT_BIAS, MAX_TOP_LOGPROBS, SamplingParams
from troth.contracts.speculation import SpeculationStats
from troth.contracts.tools import ToolError
from troth.errors import RequestError
from troth.serve import body, connection, listen, sampling, sse, tokens
from troth.serve.app import create_app
from troth.serve.errors import _TABLE
from troth.serve.fields import Fields
from troth.serve.model import ModelList
from troth.serve.openai_chat import read_chat
from troth.serve.openai_completions import read_completion
from troth.testing.fake_answer import FakeAnswer
from troth.testing.fake_engine import FakeEngine
from troth.testing.fake_server import byte_model
from troth.text.defaults import FALLBACK_TEMPERATURE
from troth.text.messages import _MEDIA_PARTS, _REASONING_NAMES, _ROLES, normalise_messages

DOCUMENT = Document.read("docs/http.md")
FIELD_COLUMNS = ("field", "type", "range", "default", "meaning")
COMMON = DOCUMENT.section("Fields of both endpoints")
SECTIONS = {"chat": "Chat: further fields", "completions": "Completions: further fields"}
READERS: dict[str, Callable[[Fields, ModelList], Any]] = {"chat": read_chat, "completions": read_completion}
LEAST: dict[str, dict[str, Any]] = {"chat": hello(), "completions": {"prompt": "hi"}}
WRONG_TYPE = {
    "string": 3,
    "boolean": "yes",
    "integer": "x",
    "number": "x",
    "object": [],
    "array": "x",
    "string or array": 3,
    "object or string": 3,
    "string or object": 3,
}


class Recorded(Fields):
    """Fields that note in ``log`` what is done with each of them."""

    def __init__(self, values: dict[str, Any], path: str = "", log: dict[str, str] | None = None) -> None:
        super().__init__(values, path)
        self.log: dict[str, str] = {} if log is None else log

    def raw(self, field: str) -> Any:
        self.log.setdefault(self.name(field), "honoured")
        return super().raw(field)

    def object(self, field: str) -> Fields | None:
        value = super().object(field)
        return None if value is None else Recorded(self.raw(field), self.name(field), self.log)

    def tolerate(self, *fields: str) -> None:
        self.log.update(dict.fromkeys(map(self.name, fields), "tolerated"))
        super().tolerate(*fields)

    def refuse(self, field: str, reason: str, *, unless: tuple[Any, ...] = ()) -> None:
        self.log[self.name(field)] = "refused"
        super().refuse(field, reason, unless=unless)


def models() -> ModelList:
    return ModelList([byte_model(FakeEngine(max_rows=sampling.MAX_CHOICES))])


def read(endpoint: str, **fields: Any) -> Any:
    return READERS[endpoint](Fields({**LEAST[endpoint], **fields}), models())


def known_fields(endpoint: str) -> dict[str, str]:
    """Every field the code of an endpoint knows -> what it does with it."""
    names = ("stream_options", "logit_bias", "chat_template_kwargs", "reasoning", "thinking")
    objects: dict[str, Any] = {name: {} for name in names}
    fields = Recorded({**LEAST[endpoint], **objects})
    READERS[endpoint](fields, models())
    parents = {name.partition(".")[0] for name in fields.log if "." in name}
    return {name: use for name, use in fields.log.items() if name not in parents}


def field_rows(endpoint: str) -> list[Row]:
    own = DOCUMENT.section(SECTIONS[endpoint]).table(*FIELD_COLUMNS)
    return [*COMMON.table(*FIELD_COLUMNS), *own]


def every_field() -> list[Any]:
    """(endpoint, row) of each honoured field, those of both endpoints for each of them."""
    return [
        pytest.param(endpoint, row, id=f"{endpoint}-{code(row['field'])}")
        for endpoint in SECTIONS
        for row in field_rows(endpoint)
    ]


def refused_rows(endpoint: str) -> list[Row]:
    return DOCUMENT.section(SECTIONS[endpoint]).table("refused", "but not", "because")


def body_with(field: str, value: Any) -> dict[str, Any]:
    """A body's fields with one, perhaps nested, set."""
    outer, _, inner = field.partition(".")
    extra = {"logprobs": True} if field == "top_logprobs" else {}
    return {**extra, outer: {inner: value} if inner else value}


def shape(value: Any) -> Any:
    """A JSON value's keys, in order, and the kinds of the rest; numbers are one kind."""
    if isinstance(value, dict):
        return {name: shape(one) for name, one in value.items()}
    if isinstance(value, list):
        return [shape(one) for one in value]
    return "number" if isinstance(value, int | float) and not isinstance(value, bool) else type(value).__name__


def app_routes() -> set[tuple[str, str]]:
    app: Any = create_app([], ServeOptions())
    while not isinstance(app, Starlette):
        app = app._app
    return {
        (method, re.sub(r":\w+}", "}", route.path))
        for route in app.routes
        if isinstance(route, Route)
        for method in (route.methods or set()) - {"HEAD"}
    }


def test_http_document_lists_every_route() -> None:
    listed = {(row["method"], code(row["path"])) for row in DOCUMENT.table("method", "path", "what")}
    assert listed == app_routes()


def test_landing_page_names_every_route_the_document_lists() -> None:
    with asking() as client:
        page = client.get("/").text
    assert [path for _, path in app_routes() if path != "/" and path.partition("/{")[0] not in page] == []


@pytest.mark.parametrize("endpoint", SECTIONS)
def test_http_document_says_what_becomes_of_each_field(endpoint: str) -> None:
    section = DOCUMENT.section(SECTIONS[endpoint])
    (hints,) = re.findall(r"Taken without effect: ([^.]+)\.", section.flat)
    listed = {code(row["field"]): "honoured" for row in field_rows(endpoint)}
    listed |= dict.fromkeys(codes(hints), "tolerated")
    listed |= {code(row["refused"]): "refused" for row in refused_rows(endpoint)}
    assert listed == known_fields(endpoint)


@pytest.mark.parametrize(("endpoint", "row"), every_field())
def test_http_document_gives_the_type_of_a_field(endpoint: str, row: Row) -> None:
    field = code(row["field"])
    with pytest.raises(RequestError) as caught:
        read(endpoint, **body_with(field, WRONG_TYPE[row["type"]]))
    assert (caught.value.param, caught.value.code) == (field, "invalid_type")
    assert row["meaning"]


@pytest.mark.parametrize(("endpoint", "row"), [one for one in every_field() if one.values[1]["range"]])
def test_http_document_gives_the_exact_bounds_of_a_field(endpoint: str, row: Row) -> None:
    field, bounds = code(row["field"]), row["range"]
    number = int if row["type"] == "integer" else float
    step = 1 if row["type"] == "integer" else 0.001

    def refused(value: float) -> bool:
        try:
            read(endpoint, **body_with(field, value))
        except RequestError as error:
            return error.param == field
        return False

    match = re.fullmatch(r"(above )?(\S+) to (\S+)", bounds)
    low = number(match[2]) if match else number(bounds.removeprefix("at least "))
    if match:
        high = number(match[3])
        assert not refused(high)
        assert refused(high + step)
        assert refused(low) == bool(match[1])
    else:
        assert not refused(low)
    assert refused(low - step)


@pytest.mark.parametrize(("endpoint", "row"), every_field())
def test_http_document_gives_the_default_of_a_sampling_field(endpoint: str, row: Row) -> None:
    field = code(row["field"])
    default = getattr(SamplingParams(), field, None)
    if field == "temperature":
        default = FALLBACK_TEMPERATURE
    if isinstance(default, int | float) and field != "seed":
        assert row["default"].removeprefix("the model's, else ") == f"{default:g}"
    else:
        assert row["default"]


@pytest.mark.parametrize("endpoint", SECTIONS)
def test_http_document_says_which_values_of_refused_fields_are_taken(endpoint: str) -> None:
    for row in refused_rows(endpoint):
        field = code(row["refused"])
        values = codes(row["but not"].replace("the value of `n`", "`2`"))
        taken = [json.loads(text) for text in values]
        for value in (None, [], *taken):
            read(endpoint, n=2, **{field: value})
        with pytest.raises(RequestError) as caught:
            read(endpoint, n=2, **{field: "something"})
        assert (caught.value.param, caught.value.code) == (field, "unsupported_parameter")


def test_http_document_gives_the_limits_of_stop_and_bias() -> None:
    meanings = {code(row["field"]): row["meaning"] for row in COMMON.table(*FIELD_COLUMNS)}
    assert f"up to {sampling.MAX_STOPS} texts of 1 to {sampling.MAX_STOP_CHARACTERS} characters" in meanings["stop"]
    assert f"-{MAX_LOGIT_BIAS:g} to {MAX_LOGIT_BIAS:g}" in meanings["logit_bias"]
    prompts = {code(row["field"]): row["meaning"] for row in field_rows("completions")}["prompt"]
    assert f"up to {sampling.MAX_CHOICES}" in prompts


def test_http_document_lists_the_roles_and_fields_of_messages() -> None:
    rows = {code(row["field"]): row["meaning"] for row in DOCUMENT.table("field", "meaning")}
    assert set(codes(rows["role"])) == {*_ROLES}
    assert "`developer` is read as `system`, `function` as `tool`" in rows["role"]
    assert [name for name, meant in _ROLES.items() if name != meant] == ["developer", "function"]
    assert {"reasoning_content", *codes(rows["reasoning_content"])} == {*_REASONING_NAMES}
    everything = {
        "role": "assistant",
        "content": "x",
        "name": "n",
        "tool_call_id": "1",
        "tool_calls": [{"function": {"name": "f", "arguments": "{}"}}],
        "reasoning": "r",
        "other": 1,
    }
    assert rows.keys() == normalise_messages([everything])[0].keys()


@pytest.mark.parametrize("kind", sorted(_MEDIA_PARTS))
def test_http_document_says_how_media_are_refused(kind: str) -> None:
    assert "(400, `capability_unavailable`)" in DOCUMENT.section("Chat: further fields").flat
    with asking() as client:
        response = client.post(CHAT, json={"messages": [{"role": "user", "content": [{"type": kind}]}]})
    assert (response.status_code, error_of(response)["code"]) == (400, "capability_unavailable")


def test_http_document_shows_the_shape_of_a_whole_reply() -> None:
    (shown,) = DOCUMENT.section("Replies").fences("json")
    with asking() as client:
        assert shape(json.loads(shown.text)) == shape(client.post(CHAT, json=hello()).json())


def test_http_document_names_the_fields_of_a_completion() -> None:
    with asking() as client:
        value = client.post(COMPLETIONS, json={"prompt": "hi"}).json()
    *names, last = (f"`{name}`" for name in value["choices"][0])
    sentence = f"A completion has `object` `{value['object']}` and choices of {', '.join(names)} and {last}."
    assert sentence in DOCUMENT.section("Replies").flat


def test_http_document_shows_the_shape_of_every_record_of_a_stream() -> None:
    (shown,) = DOCUMENT.section("Streams").fences("text")
    options = {"include_usage": True, "include_progress": True}
    with asking(FakeEngine("P")) as client:
        response = client.post(CHAT, json=hello(stream=True, stream_options=options))
    assert list(map(shape, records(shown.text))) == list(map(shape, records(response.text)))
    assert shown.text.endswith("\n\n")


def test_http_document_lists_what_the_troth_object_holds() -> None:
    rows = {code(row["field"]): codes(row["meaning"]) for row in DOCUMENT.table("field", "where", "meaning")}
    progress = {"stream": True, "stream_options": {"include_progress": True}}
    error = ToolError(reason="malformed", message="no")
    drafts = SpeculationStats()
    answer = FakeAnswer(text="Hello there.", errors=(error,), unclosed_reasoning=True, speculation=drafts)
    engine = FakeEngine(answer, max_rows=1, step_s=0.001)
    with asking(engine) as client:
        body = hello(strange=1, guided_json={"not": {}})
        whole = client.post(CHAT, json=body, headers={"x-troth-debug": "1"}).json()
        first, second = client.run(both(client.http, hello(**progress)))
    seen: dict[str, Any] = dict(whole["troth"])
    (seen["tool_errors"],) = seen["tool_errors"]
    for one in [*records(first.text), *records(second.text)]:
        seen |= {name: value for name, value in one.get("troth", {}).items() if name != "tool_errors"}
    assert rows.keys() == seen.keys()
    for name, value in seen.items():
        if isinstance(value, dict):
            assert rows[name] == list(value), name


async def both(http: httpx.AsyncClient, body: dict[str, Any]) -> list[httpx.Response]:
    """The replies to two requests at once, of which one must wait for the only row."""
    return await asyncio.gather(*(http.post(CHAT, json=body) for _ in range(2)))


def test_http_document_gives_every_limit_as_the_code_has_it() -> None:
    options, engine = ServeOptions(), EngineOptions()
    assert options.request_timeout_s is None
    expected = {
        "body": f"{options.max_body_bytes >> 20} MiB",
        "bodies held at once, all together": f"{body._HELD_BODIES} of the largest size",
        "time for a body to arrive": f"{body.BODY_TIMEOUT_S:g} s",
        "time for a header to arrive": f"{connection.HEADER_TIMEOUT_S:g} s",
        "idle connection": f"{listen.IDLE_TIMEOUT_S:g} s",
        "answers under way": str(options.max_streams),
        "requests waiting for a row": str(engine.max_waiting),
        "time for an answer": "none",
        "silence of a stream": f"{options.keepalive_s:g} s",
        "client that takes nothing": f"{sse.STALL_S:g} s",
        "answers of one request": str(sampling.MAX_CHOICES),
        "stop strings": f"{sampling.MAX_STOPS} of {sampling.MAX_STOP_CHARACTERS} characters",
        "log-probabilities beside a token": str(MAX_TOP_LOGPROBS),
        "answers under way when the server is told to stop": f"{listen.Server.grace_s:g} s to end",
    }
    assert {row["what"]: row["limit"] for row in DOCUMENT.table("what", "limit", "set by")} == expected


def test_http_document_lists_every_status_and_code_that_http_itself_knows() -> None:
    raised = {
        (int(ast.unparse(call.args[0])), ast.literal_eval(keyword.value))
        for path in (ROOT / "src" / "troth" / "serve").glob("*.py")
        for call in ast.walk(ast.parse(path.read_text()))
        if isinstance(call, ast.Call)
        and ast.unparse(call.func) == "HttpError"
        and isinstance(call.args[0], ast.Constant)
        for keyword in call.keywords
        if keyword.arg == "code"
    }
    mapped = {(row.status, row.code) for row in _TABLE.values() if row.status in (429, 503)}
    rows = DOCUMENT.table("status", "code", "when")
    listed = {(int(row["status"]), code(row["code"])) for row in rows if row["code"]}
    assert listed == raised | mapped | {(400, "invalid_json"), (404, "model_not_found")}
    statuses = {int(row["status"]) for row in rows}
    assert statuses == {200} | {status for status, _ in listed} | {row.status for row in _TABLE.values()}


def test_http_document_lists_the_fields_of_the_tokenizer_routes(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = {code(row["route"]): row for row in DOCUMENT.table("route", "fields", "reply")}
    bodies = {"/tokenize": ({"prompt": "a"}, hello()), "/detokenize": ({"tokens": [65]},)}
    assert rows.keys() == bodies.keys()
    for route, examples in bodies.items():
        log: dict[str, str] = {}
        monkeypatch.setattr(tokens, "Fields", lambda values, log=log: Recorded(values, log=log))
        with asking() as client:
            replies = [client.post(route, json=example).json() for example in examples]
        assert set(codes(rows[route]["fields"])) == log.keys()
        assert all(codes(rows[route]["reply"]) == list(reply) for reply in replies)


def test_http_document_lists_the_fields_of_a_model_and_of_the_status() -> None:
    state = DOCUMENT.section("State")
    parts = {code(row["part"]): codes(row["fields"]) for row in state.table("part", "fields")}
    with asking() as client:
        (model,) = client.get("/v1/models").json()["data"]
        status = client.get("/v1/status").json()
    (engine,) = status["engines"]
    assert parts == {
        "info": list(engine["info"]),
        "info.plan": list(engine["info"]["plan"]),
        "status": list(engine["status"]),
        "status.prefix_cache": [field.name for field in dataclasses.fields(PrefixCacheStatus)],
        "objects.grammars": list(engine["objects"]["grammars"]),
    }
    flat = state.flat
    assert f"has {listing(list(status))}, each with {listing(list(engine))}" in flat
    *common, context, longest = (f"`{name}`" for name in model)
    assert f"{', '.join(common)} and, once loaded, {context} and {longest}" in flat


def listing(names: list[str]) -> str:
    *first, last = (f"`{name}`" for name in names)
    return f"{', '.join(first)} and {last}"


class DiskEngine(FakeEngine):
    """An engine that looked for a prompt on disk, and drafted."""

    async def status(self) -> EngineStatus:
        disk = DiskCacheStatus(folder="/c", num_bytes=1, quota_bytes=2, num_restores={"restored": 1})
        drafts = SpeculationStats(num_drafted_by_source={"ngram": 3}, num_accepted_by_source={"ngram": 1})
        cache = PrefixCacheStatus(disk=disk)
        return dataclasses.replace(await super().status(), prefix_cache=cache, speculation=drafts)


def test_http_document_lists_every_metric_with_its_labels() -> None:
    with asking(DiskEngine(FakeAnswer(text="Hello"))) as client:
        client.post(CHAT, json=hello())
        text = client.get("/metrics").text
    kinds = dict(re.findall(r"^# TYPE (troth_\w+) (\w+)$", text, re.MULTILINE))
    labels = {
        name: set(re.findall(r'(\w+)="', found[0])) - {"le"}
        for name in kinds
        if not name.endswith("_created")
        and (found := re.findall(rf"^{name}(?:_count)?(?:{{([^}}]*)}})? ", text, re.MULTILINE))
    }
    listed = {code(row["metric"]): set(codes(row["labels"])) for row in DOCUMENT.table("metric", "labels", "what")}
    assert listed == labels
