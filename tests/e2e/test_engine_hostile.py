"""Bad input to the Python face with the demo model: an error that names the value, and an engine that goes on."""

from __future__ import annotations

import math
import resource
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.conftest import ENGINE_CONTEXT
from troth.config.options import ModelOptions
from troth.errors import ContextExceeded, ModelLoadError, OptionError, RequestError
from troth.library import Engine

pytestmark = pytest.mark.e2e

VOCAB = 49152
MEGABYTE = 10**6


@pytest.fixture(scope="module", autouse=True)
def answers_afterwards(running_engine: Engine) -> Iterator[None]:
    """The law of this file."""
    expected = running_engine.complete("One, two,", temperature=0, max_tokens=4).text
    yield
    assert running_engine.complete("One, two,", temperature=0, max_tokens=4).text == expected


def named(value: object) -> str:
    """What a case is called: the same in every process, which the address in a ``repr`` is not."""
    return repr(value)[:60].partition(" object at ")[0]


MESSAGES: list[tuple[str, Any]] = [
    ("messages", []),
    ("messages", None),
    ("messages", 5),
    ("messages", b"Hi"),
    ("messages", {"role": "user", "content": "Hi"}),
    ("messages", iter([{"role": "user", "content": "Hi"}])),
    ("messages[0]", ["Hi"]),
    ("messages[0].role", [{"content": "Hi"}]),
    ("messages[0].role", [{"role": "wizard", "content": "Hi"}]),
    ("messages[0].role", [{"role": None, "content": "Hi"}]),
    ("messages[0].content", [{"role": "user"}]),
    ("messages[0].content", [{"role": "user", "content": math.nan}]),
    ("messages[0].content", [{"role": "user", "content": "\ud800"}]),
    ("messages[0].content", "\udfff"),
    ("messages[0].content[0]", [{"role": "user", "content": [None]}]),
]


@pytest.mark.parametrize(("param", "messages"), MESSAGES, ids=named)
def test_chat_names_the_message_it_cannot_use(engine: Engine, param: str, messages: Any) -> None:
    with pytest.raises(RequestError) as caught:
        engine.chat(messages, max_tokens=1)
    assert caught.value.param == param
    assert param.partition("[")[0] in str(caught.value)


PROMPTS: list[tuple[str, Any]] = [
    ("prompt", ""),
    ("prompt", []),
    ("prompt", None),
    ("prompt", 5),
    ("prompt", b"Hi"),
    ("prompt", {5: 5}),
    ("prompt", iter([5])),
    ("prompt", "\ud800"),
    ("prompt[0]", [-1]),
    ("prompt[1]", [5, VOCAB]),
    ("prompt[0]", [2**70]),
    ("prompt[0]", [1.0]),
    ("prompt[0]", [True]),
    ("prompt[0]", ["Hi"]),
    ("prompt[0]", [[5]]),
]


@pytest.mark.parametrize(("param", "prompt"), PROMPTS, ids=named)
def test_completion_names_the_prompt_it_cannot_use(engine: Engine, param: str, prompt: Any) -> None:
    with pytest.raises(RequestError) as caught:
        engine.complete(prompt, max_tokens=1)
    assert caught.value.param == param


OPTIONS: list[tuple[str, list[Any]]] = [
    ("max_tokens", [0, -1, 1.5, "5", math.nan, math.inf, True, [], ENGINE_CONTEXT, 2**62, 10**30]),
    ("stop", ["", [""], ["a", ""], 5, [5], [None], b"a", {"a": 1}]),
    ("temperature", [-0.1, math.nan, math.inf, -math.inf, 1e308, 10**400, "1", True, [1]]),
    ("top_p", [0, -1, 1.1, math.nan, "1"]),
    ("top_k", [-1, 1.5, 2**31, math.nan, "1"]),
    ("min_p", [-1, 1.1, math.nan]),
    ("xtc_probability", [2, math.nan]),
    ("xtc_threshold", [-1, math.inf]),
    ("repetition_penalty", [0, -1, 101, math.nan]),
    ("presence_penalty", [-2.1, math.nan]),
    ("frequency_penalty", [2.1, math.nan]),
    ("seed", [-1, 2**64, 1.5, "x", math.nan]),
    ("logprobs", [-1, 21, 1.5, True, "x"]),
    ("prompt_logprobs", [-1, 21, True]),
    ("logit_bias", [{VOCAB: 1}, {-1: 1}, {"5": 1}, {5: 101}, {5: math.nan}, [5], 5, "ab", ((5, 1), (5, 2))]),
    ("ignore_eos", ["yes", 1]),
    ("prompt_cache", ["yes", 0]),
    ("priority", ["high", 0.5, math.nan, 2**64]),
    ("n", [2]),
    ("stream", [True]),
    ("top_logprobs", [3]),
    ("max_completion_tokens", [3]),
]


@pytest.mark.parametrize(
    ("name", "value"),
    [
        pytest.param(name, value, id=f"{name}-{'huge' if value == 10**400 else repr(value)[:40]}")
        for name, values in OPTIONS
        for value in values
    ],
)
def test_option_that_cannot_be_used_is_refused_by_name(engine: Engine, name: str, value: Any) -> None:
    """Some of these ended the engine, or left their caller waiting for ever."""
    with pytest.raises(RequestError) as caught:
        engine.complete("Hi", **{"max_tokens": 1, name: value})
    assert caught.value.param == name
    assert name in str(caught.value) or "stop string" in str(caught.value)
    assert len(str(caught.value)) < 300


@pytest.mark.parametrize("variables", [5, "x", [1], {5: 5}])
def test_template_variables_that_are_no_mapping_are_refused(engine: Engine, variables: Any) -> None:
    with pytest.raises(RequestError) as caught:
        engine.chat("Hi", template_variables=variables)
    assert caught.value.param == "template_variables"


def test_odd_but_allowed_options_are_served(engine: Engine) -> None:
    for options in (
        {"temperature": 5e-324, "top_p": 1e-300},
        {"temperature": 100, "min_p": 1, "repetition_penalty": 0.01, "xtc_probability": 1, "xtc_threshold": 0},
        {"logit_bias": dict.fromkeys(range(0, VOCAB, 5), -100), "logprobs": 20, "prompt_logprobs": 20},
        {"stop": ["x" * 10_000, "\ud800", "\x00"], "priority": -(2**60), "seed": 2**64 - 1, "prompt_cache": False},
        dict.fromkeys(("stop", "seed", "temperature", "logprobs", "priority", "ignore_eos", "prompt_cache")),
    ):
        reply = engine.complete("Hi \x00", **{"max_tokens": 1, **options})
        assert reply.usage.num_completion_tokens == 1


@pytest.mark.parametrize(
    "prompt",
    [
        pytest.param("word " * (2 * MEGABYTE), id="words"),
        pytest.param("\x00" * (10 * MEGABYTE), id="NULs"),
        pytest.param([5] * (5 * MEGABYTE), id="ids"),
        pytest.param([{"role": "user", "content": "\n" * (10 * MEGABYTE)}], id="newlines"),
        pytest.param([{"role": "user", "content": "a"}] * 200_000, id="messages"),
    ],
)
def test_prompt_of_ten_megabytes_is_counted_and_refused(engine: Engine, prompt: Any) -> None:
    before, ends = _peak_bytes(), engine.status().num_requests_by_end
    is_chat = isinstance(prompt, list) and isinstance(prompt[0], dict)
    with pytest.raises(ContextExceeded) as caught:
        (engine.chat if is_chat else engine.complete)(prompt)
    assert caught.value.param == ("messages" if is_chat else "prompt")
    assert caught.value.num_prompt_tokens >= caught.value.limit == ENGINE_CONTEXT
    assert str(ENGINE_CONTEXT) in str(caught.value)
    assert engine.status().num_requests_by_end == ends, "the engine was asked"
    assert _peak_bytes() - before < 400 * MEGABYTE


def _peak_bytes() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


@pytest.mark.parametrize("broken", ["folder without weights", "no such path", "no model", "empty name", "NUL", "text"])
def test_open_names_the_path_it_cannot_open(demo_model: None, tmp_path: Path, broken: str) -> None:
    (tmp_path / "notes.gguf").write_text("not a model")
    (tmp_path / "config.json").write_text("{")
    path = {
        "folder without weights": str(tmp_path),
        "no such path": str(tmp_path / "gone"),
        "no model": str(tmp_path / "notes.gguf"),
        "empty name": "",
        "NUL": "\x00",
        "text": str(tmp_path / "config.json"),
    }[broken]
    with pytest.raises(ModelLoadError) as caught:
        Engine.open(path)
    assert path in str(caught.value)


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"context_tokens": 10**6}, "context"),
        ({"device": "abacus"}, "abacus"),
        ({"chat_template": "/nowhere/template.jinja"}, "/nowhere/template.jinja"),
    ],
)
def test_open_names_the_option_it_cannot_honour(demo_model: None, options: dict[str, Any], told: str) -> None:
    with pytest.raises((OptionError, ModelLoadError)) as caught:
        Engine.open(model_options=ModelOptions(**options))
    assert told in str(caught.value)
