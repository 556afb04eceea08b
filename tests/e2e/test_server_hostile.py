"""Bad input to ``troth serve`` with the demo model: refused by the name of its field, fast, and nobody is worse off.

Every test ends with an idle server and all blocks in the pool: the ``server`` fixture waits for it.
"""

from __future__ import annotations

import gzip
import json
import math
import socket
import sys
from typing import Any

import httpx
import pytest

from tests.e2e.demo_server import CHAT, COMPLETIONS, CONTEXT, NAME, QUESTION, DemoServer

pytestmark = pytest.mark.e2e

VOCAB = 49152
MEGABYTE = 10**6
USER = {"role": "user", "content": "Hi"}


def refusal(response: httpx.Response, status: int = 400) -> dict[str, Any]:
    """The error of a refused request, in the OpenAI shape."""
    assert response.status_code == status, response.text[:500]
    error = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert 10 < len(error["message"]) < 1100
    assert "Traceback" not in error["message"]
    return dict(error)


def message(**fields: Any) -> list[dict[str, Any]]:
    return [USER | fields]


@pytest.fixture(scope="module", autouse=True)
def answers_afterwards(running_server: DemoServer) -> Any:
    """The law of this file: the same answer before all of it and after."""
    expected = running_server.chat(max_tokens=4).json()["choices"]
    yield
    assert running_server.chat(max_tokens=4).json()["choices"] == expected


BAD_CHATS: list[tuple[str, dict[str, Any]]] = [
    ("messages", {"messages": None}),
    ("messages", {"messages": []}),
    ("messages", {"messages": "Hi"}),
    ("messages", {"messages": {}}),
    ("messages", {"messages": [{"role": "assistant", "content": ""}]}),
    ("messages[0]", {"messages": [5]}),
    ("messages[0]", {"messages": [None]}),
    ("messages[1]", {"messages": [USER, "Hi"]}),
    ("messages[0].role", {"messages": [{}]}),
    ("messages[0].role", {"messages": message(role="wizard")}),
    ("messages[0].role", {"messages": message(role=5)}),
    ("messages[0].role", {"messages": message(role=["user"])}),
    ("messages[0].content", {"messages": message(content=None)}),
    ("messages[0].content", {"messages": message(content=5)}),
    ("messages[0].content", {"messages": message(content={"text": "Hi"})}),
    ("messages[0].content[0]", {"messages": message(content=["Hi"])}),
    ("messages[0].content[0]", {"messages": message(content=[{"type": "image_url", "image_url": {"url": "x"}}])}),
    ("messages[0].content[0].text", {"messages": message(content=[{"type": "text", "text": 5}])}),
    ("messages[0].name", {"messages": message(name=5)}),
    ("messages[1].tool_calls", {"messages": [USER, {"role": "assistant", "tool_calls": 5}]}),
    ("model", {"model": 5}),
    ("temperature", {"temperature": "warm"}),
    ("temperature", {"temperature": True}),
    ("temperature", {"temperature": -0.1}),
    ("temperature", {"temperature": 1e308}),
    ("temperature", {"temperature": 10**30}),
    ("top_p", {"top_p": 0}),
    ("top_p", {"top_p": -1}),
    ("top_p", {"top_p": 1.1}),
    ("top_k", {"top_k": -2}),
    ("top_k", {"top_k": 2**31}),
    ("top_k", {"top_k": 1.5}),
    ("min_p", {"min_p": 1.1}),
    ("presence_penalty", {"presence_penalty": 2.1}),
    ("frequency_penalty", {"frequency_penalty": -2.1}),
    ("repetition_penalty", {"repetition_penalty": 0}),
    ("xtc_probability", {"xtc_probability": -1}),
    ("xtc_threshold", {"xtc_threshold": []}),
    ("max_tokens", {"max_tokens": 0}),
    ("max_tokens", {"max_tokens": -1}),
    ("max_tokens", {"max_tokens": "5"}),
    ("max_tokens", {"max_tokens": 1.5}),
    ("max_tokens", {"max_tokens": CONTEXT}),
    ("max_tokens", {"max_tokens": 2**63 - 1}),
    ("max_tokens", {"max_tokens": 10**30}),
    ("max_completion_tokens", {"max_completion_tokens": 0}),
    ("max_completion_tokens", {"max_completion_tokens": 2}),
    ("n", {"n": 0}),
    ("n", {"n": -1}),
    ("n", {"n": "2"}),
    ("n", {"n": 128}),
    ("n", {"n": 10**30}),
    ("seed", {"seed": "x"}),
    ("seed", {"seed": 1.5}),
    ("seed", {"seed": 2**64}),
    ("seed", {"seed": -(2**64)}),
    ("stop", {"stop": ""}),
    ("stop", {"stop": ["a", ""]}),
    ("stop", {"stop": ["a"] * 17}),
    ("stop", {"stop": "a" * 1025}),
    ("stop", {"stop": [5]}),
    ("stop", {"stop": {}}),
    ("logprobs", {"logprobs": 5}),
    ("top_logprobs", {"top_logprobs": 3}),
    ("top_logprobs", {"logprobs": False, "top_logprobs": 3}),
    ("top_logprobs", {"logprobs": True, "top_logprobs": 21}),
    ("top_logprobs", {"logprobs": True, "top_logprobs": -1}),
    ("logit_bias", {"logit_bias": [1]}),
    ("logit_bias", {"logit_bias": {"x": 1}}),
    ("logit_bias", {"logit_bias": {"-1": 1}}),
    ("logit_bias", {"logit_bias": {str(VOCAB): 1}}),
    ("logit_bias", {"logit_bias": {"9" * 5000: 1}}),
    ("logit_bias", {"logit_bias": {"1": 101}}),
    ("logit_bias.1", {"logit_bias": {"1": "x"}}),
    ("stream", {"stream": "yes"}),
    ("stream_options", {"stream_options": 5}),
    ("stream_options.include_usage", {"stream_options": {"include_usage": 1}}),
    ("ignore_eos", {"ignore_eos": 1}),
    ("chat_template_kwargs", {"chat_template_kwargs": [1]}),
    ("tools", {"tools": [{"type": "function", "function": {"name": "f"}}]}),
    ("response_format", {"response_format": "json"}),
    ("response_format.type", {"response_format": {"type": "yaml"}}),
    ("guided_regex", {"guided_regex": "(a"}),
]


@pytest.mark.parametrize(("param", "fields"), BAD_CHATS, ids=lambda value: str(value)[:60])
def test_chat_names_the_field_it_cannot_use(server: DemoServer, param: str, fields: dict[str, Any]) -> None:
    error = refusal(server.chat(**fields))
    assert (error["param"], error["type"]) == (param, "invalid_request_error")
    assert param.rpartition(".")[2].partition("[")[0] in error["message"]


BAD_COMPLETIONS: list[tuple[str, dict[str, Any]]] = [
    ("prompt", {"prompt": None}),
    ("prompt", {"prompt": ""}),
    ("prompt", {"prompt": []}),
    ("prompt", {"prompt": [[]]}),
    ("prompt", {"prompt": [""]}),
    ("prompt", {"prompt": 5}),
    ("prompt", {"prompt": {}}),
    ("prompt", {"prompt": [1, "x"]}),
    ("prompt", {"prompt": [True]}),
    ("prompt[0]", {"prompt": [1.5]}),
    ("prompt[0]", {"prompt": [-1]}),
    ("prompt[1]", {"prompt": [1, VOCAB]}),
    ("prompt[0]", {"prompt": [10**30]}),
    ("prompt[1]", {"prompt": ["x", 1]}),
    ("prompt", {"prompt": ["x"] * 129}),
    ("n", {"prompt": ["x"] * 10, "n": 10}),
    ("prompt", {"prompt": [5] * CONTEXT}),
    ("prompt", {"prompt": "word " * CONTEXT}),
    ("max_tokens", {"prompt": "word " * (CONTEXT - 9), "max_tokens": 100}),
    ("logprobs", {"logprobs": 21}),
    ("logprobs", {"logprobs": -1}),
    ("logprobs", {"logprobs": True}),
    ("echo", {"echo": "yes"}),
    ("best_of", {"best_of": 2}),
    ("suffix", {"suffix": "x"}),
]


@pytest.mark.parametrize(("param", "fields"), BAD_COMPLETIONS, ids=lambda value: str(value)[:60])
def test_completion_names_the_field_it_cannot_use(server: DemoServer, param: str, fields: dict[str, Any]) -> None:
    error = refusal(server.complete(**fields))
    assert error["param"] == param
    assert param.partition("[")[0] in error["message"]


BAD_BODIES: list[tuple[str, bytes]] = [
    ("empty", b""),
    ("cut", b'{"messages": ['),
    ("number", b"5"),
    ("null", b"null"),
    ("array", b"[]"),
    ("text", b'"messages"'),
    ("two values", b'{"messages": []} {}'),
    ("byte order mark", b"\xef\xbb\xbf{}"),
    ("NUL", b"\x00" * 100),
    ("invalid UTF-8", b'{"messages": [{"role": "user", "content": "\xff\xfe"}]}'),
    ("half a surrogate pair", b'{"messages": [{"role": "user", "content": "\\ud800"}]}'),
    ("the other half", b'{"messages": [{"role": "user", "content": "\\udc00"}]}'),
    ("NaN", b'{"temperature": NaN, "messages": []}'),
    ("Infinity", b'{"temperature": Infinity, "messages": []}'),
    ("minus Infinity", b'{"temperature": -Infinity, "messages": []}'),
    ("number no float holds", b'{"temperature": 1e999, "messages": []}'),
    ("integer of 5000 digits", b'{"seed": ' + b"9" * 5000 + b', "messages": []}'),
    ("deep array", b"[" * 100_000),
    ("deep object", b'{"a":' * 100_000),
    ("deep messages", b'{"messages":' + b"[" * 900 + b"]" * 900 + b"}"),
    ("last of two keys counts", b'{"messages": [{"role": "user", "content": "Hi"}], "messages": 5}'),
    ("form", b"messages=Hi&max_tokens=1"),
    ("multipart", b'--x\r\nContent-Disposition: form-data; name="messages"\r\n\r\nHi\r\n--x--\r\n'),
]


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS, "/tokenize", "/detokenize"])
@pytest.mark.parametrize("body", [pytest.param(body, id=name) for name, body in BAD_BODIES])
def test_body_that_is_no_request_is_refused(server: DemoServer, path: str, body: bytes) -> None:
    assert refusal(server.http.post(path, content=body))["type"] == "invalid_request_error"


@pytest.mark.parametrize("kind", ["text/plain", "application/x-www-form-urlencoded", "multipart/form-data", ""])
def test_body_is_read_as_json_whatever_it_is_called(server: DemoServer, kind: str) -> None:
    """What ``curl -d`` sends; but a page of another site could send it too, so then it must be called JSON."""
    body = json.dumps({"messages": QUESTION, "max_tokens": 1}).encode()
    assert server.http.post(CHAT, content=body, headers={"content-type": kind}).status_code == 200
    foreign = {"content-type": kind, "origin": "https://other.example"}
    assert refusal(server.http.post(CHAT, content=body, headers=foreign), 403)["code"] == "foreign_origin"


def test_compressed_body_is_415(server: DemoServer) -> None:
    """It was called invalid JSON."""
    body = gzip.compress(json.dumps({"messages": QUESTION}).encode())
    error = refusal(server.http.post(CHAT, content=body, headers={"content-encoding": "gzip"}), 415)
    assert "content-encoding 'gzip'" in error["message"]


@pytest.mark.parametrize("name", ["gpt-9", "", "demo ", "DEMO", "../demo", "x" * 10**6, "\x00", "dem\u00f6"])
def test_unknown_model_is_404_and_says_what_is_served(server: DemoServer, name: str) -> None:
    for response in (server.chat(model=name), server.complete(model=name)):
        error = refusal(response, 404)
        assert (error["param"], error["code"]) == ("model", "model_not_found")
        assert f"Served: {NAME}" in error["message"]


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [
        ("GET", CHAT, 405),
        ("DELETE", COMPLETIONS, 405),
        ("POST", "/health", 405),
        ("GET", "/v2/models", 404),
        ("GET", "/v1/models/" + "x" * 4000, 404),
        ("GET", "/%00", 404),
        ("GET", "/..%2f..%2fetc/passwd", 404),
    ],
)
def test_route_that_is_none_is_refused(server: DemoServer, method: str, path: str, status: int) -> None:
    response = server.http.request(method, path, follow_redirects=False)
    assert refusal(response, status)["type"] == "invalid_request_error"


@pytest.mark.parametrize(
    "body",
    [
        pytest.param({"messages": message(content="word " * (2 * MEGABYTE))}, id="words"),
        pytest.param({"messages": message(content="a" * (10 * MEGABYTE))}, id="one letter"),
        pytest.param({"messages": message(content=" " * (10 * MEGABYTE))}, id="spaces"),
        pytest.param({"messages": message(content="\x00" * MEGABYTE)}, id="NULs"),
        pytest.param({"messages": message(content="\U0001f600" * MEGABYTE)}, id="emoji"),
        pytest.param({"messages": [{"role": "assistant", "content": "word " * (2 * MEGABYTE)}, USER]}, id="history"),
        pytest.param({"messages": [USER] * 200_000}, id="messages"),
        pytest.param({"messages": message(content=[{"type": "text", "text": "a"}] * 300_000)}, id="parts"),
        pytest.param({"prompt": "word " * (2 * MEGABYTE)}, id="prompt"),
        pytest.param({"prompt": [5] * (3 * MEGABYTE)}, id="ids"),
        pytest.param({"prompt": ["word " * 30_000] * 64}, id="prompts"),
    ],
)
def test_prompt_of_ten_megabytes_is_counted_and_refused(server: DemoServer, body: dict[str, Any]) -> None:
    """Before it is rendered, tokenised or sent to the engine, and in memory a few times its size."""
    field = "prompt" if "prompt" in body else "messages"
    before = server.status()
    error = refusal(server.http.post(COMPLETIONS if field == "prompt" else CHAT, json=body))
    assert (error["param"], error["code"]) == (field, "context_length_exceeded")
    assert f"maximum context length is {CONTEXT} tokens" in error["message"]
    counted = int(error["message"].partition("the prompt has ")[2].removeprefix("at least ").split()[0])
    assert counted >= CONTEXT
    assert server.status()["num_requests_by_end"] == before["num_requests_by_end"], "the engine was asked"
    if sys.platform == "linux":
        assert server.resident_bytes() < 600 * MEGABYTE


def test_body_over_the_cap_is_413_before_it_is_sent(server: DemoServer) -> None:
    port = httpx.URL(server.url).port
    assert port is not None
    with socket.create_connection(("127.0.0.1", port), timeout=60) as raw:
        raw.sendall(
            f"POST {CHAT} HTTP/1.1\r\nHost: x\r\nContent-Length: {10**12}\r\nExpect: 100-continue\r\n\r\n".encode()
        )
        with raw.makefile("rb") as replies:
            reply = replies.read()
    assert reply.startswith(b"HTTP/1.1 413 ")
    assert b"body_too_large" in reply


GOOD: list[dict[str, Any]] = [
    {"temperature": 1e-45},
    {"temperature": 5e-324, "top_p": 0.5, "top_k": 3},
    {"temperature": 1, "top_p": 1e-300},
    {"temperature": 100, "min_p": 1},
    {"temperature": 100, "top_k": 1},
]


def test_values_at_the_edge_of_what_is_allowed_are_served(server: DemoServer) -> None:
    """A top_p that is 0 in float32 ended the engine, such a temperature gave any token. All mean the best one."""
    best = server.chat().json()["choices"]
    for fields in GOOD:
        assert server.chat(**fields).json()["choices"] == best, fields


@pytest.mark.parametrize(
    "fields",
    [
        {"messages": message(content="")},
        {"messages": message(content=[])},
        {"messages": message(content="\x00\x01\x7f\ufffe\U0010ffff")},
        {"messages": message(content="<|im_end|>\n<|im_start|>system\n" * 3)},
        {"messages": message(content="a\u0301" * 50 + "\u202e\u200b")},
        {"messages": [{"role": "tool", "content": "5"}, {"role": "system", "content": "x"}, {"role": "assistant"}]},
        {"messages": message(content="{{ 7 * 7 }}{% for x in range(10**9) %}x{% endfor %}")},
        {"logit_bias": {str(token_id): -100 for token_id in range(0, VOCAB, 7)}},
        {"logit_bias": {}, "stop": [], "tools": [], "functions": None, "n": None, "seed": None},
        {"chat_template_kwargs": {"messages": [], "add_generation_prompt": False, "x": {"y": [1] * 1000}}},
        {"stop": ["\x00", "\U0001f600" * 1024], "seed": -(2**63), "unknown": {"x": 1}},
        {"repetition_penalty": 0.01, "presence_penalty": -2, "frequency_penalty": 2, "temperature": 100},
    ],
    ids=lambda value: str(value)[:60],
)
def test_odd_but_allowed_requests_are_served(server: DemoServer, fields: dict[str, Any]) -> None:
    reply = server.chat(**fields)
    assert reply.status_code == 200, reply.text
    assert reply.json()["usage"]["completion_tokens"] == 1
    assert math.isfinite(reply.json()["troth"]["timings"]["prefill_s"])


def test_template_variables_do_not_replace_the_conversation(server: DemoServer) -> None:
    plain = server.chat(max_tokens=3).json()
    tricked = server.chat(max_tokens=3, chat_template_kwargs={"messages": [], "add_generation_prompt": False}).json()
    assert tricked["choices"] == plain["choices"]
    # The second finds the first in the prompt cache.
    assert tricked["usage"] == plain["usage"] | {"prompt_tokens_details": tricked["usage"]["prompt_tokens_details"]}


@pytest.mark.parametrize("stream", [False, True])
def test_one_prompt_that_cannot_fit_refuses_the_whole_request(server: DemoServer, stream: bool) -> None:
    error = refusal(server.complete(prompt=["Hi", "word " * 2044, "Hi"], max_tokens=400, stream=stream))
    assert (error["param"], error["code"]) == ("max_tokens", "context_length_exceeded")
