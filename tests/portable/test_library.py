"""The Python face over scripted answers: how options become requests, and when an engine is closed."""

from __future__ import annotations

import gc
import subprocess
import sys
from types import SimpleNamespace
from typing import Any

import pytest

from tests.cli_engine import ScriptedThread
from troth.config.options import ModelOptions
from troth.contracts.capabilities import TemplateCapabilities
from troth.contracts.request import Request
from troth.errors import CapabilityUnavailable, ModelLoadError, RequestError
from troth.library import Engine
from troth.testing.byte_tokenizer import BytePrompts, ByteTokenizer
from troth.testing.fake_answer import FakeAnswer
from troth.text.defaults import GenerationDefaults


def text_side(**parts: Any) -> Any:
    return SimpleNamespace(
        prompts=lambda context_tokens: BytePrompts(),
        tokenizer=ByteTokenizer(),
        capabilities=TemplateCapabilities(),
        calls=None,
        defaults=GenerationDefaults.from_config({}),
        **parts,
    )


def engine(text: str = "Hello.", **parts: Any) -> tuple[Engine, ScriptedThread]:
    thread = ScriptedThread(lambda request: FakeAnswer(text=text), 8192, lambda event: None)
    return Engine(thread, text_side(**parts)), thread  # type: ignore[arg-type]


def request_of(**options: Any) -> Request:
    one, thread = engine()
    one.complete("Hi", **options)
    return thread.requests[0]


def test_options_of_none_mean_not_given() -> None:
    """``seed=None`` was seed 0, ``stop=None`` a TypeError."""
    names = ("max_tokens", "stop", "ignore_eos", "priority", "prompt_cache", "seed", "temperature", "logit_bias")
    requests = [request_of(**dict.fromkeys(names)) for _ in range(3)]
    assert len({one.sampling.seed for one in requests}) == 3
    plain = request_of()
    assert (requests[0].stop, requests[0].max_tokens, requests[0].priority) == ((), None, 0)
    assert (requests[0].eos_ids, requests[0].prompt_cache) == (plain.eos_ids, True)
    assert requests[0].sampling.temperature == plain.sampling.temperature


def test_warm_pins_what_every_conversation_begins_with() -> None:
    one, thread = engine()
    thread.status_now = lambda: SimpleNamespace(prefix_cache=None)  # type: ignore[attr-defined]
    system, question = {"role": "system", "content": "Be brief."}, {"role": "user", "content": "Why?"}
    one.warm([system], name="short", cache_salt="mine")
    one.warm([system, question])
    one.warm(prompt="def main():")
    one.chat([system, question])
    opening, turn, text, asked = thread.requests
    assert bytes(opening.prompt_ids) == b"system: Be brief.\nuser: "
    assert (opening.pin, opening.namespace, opening.max_tokens) == ("short", "mine", 1)
    assert turn.prompt_ids == asked.prompt_ids[: asked.boundary]
    assert (turn.boundary, turn.sampling.temperature) == (len(turn.prompt_ids), 0.0)
    assert bytes(text.prompt_ids) == b"def main():"
    names = {turn.pin, text.pin}
    assert len(names) == 2
    assert all(str(name).startswith("prefix-") for name in names)


@pytest.mark.parametrize(
    ("options", "param"),
    [
        ({}, "messages"),
        ({"messages": "Hi", "prompt": "Hi"}, "messages"),
        ({"messages": 5}, "messages"),
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "boss", "content": ""}]}, "messages[0].role"),
        ({"messages": "Hi", "max_tokens": 5}, "max_tokens"),
        ({"messages": "Hi", "template_variables": ["a"]}, "template_variables"),
        ({"messages": "Hi", "cache_salt": 5}, "cache_salt"),
        ({"messages": "Hi", "cache_salt": 0}, "cache_salt"),
        ({"prompt": ""}, None),
    ],
)
def test_warm_names_what_it_cannot_use(options: dict[str, Any], param: str | None) -> None:
    one, thread = engine()
    with pytest.raises(RequestError) as caught:
        one.warm(**options)
    assert caught.value.param == param
    assert not thread.requests


@pytest.mark.parametrize(("stop", "expected"), [("a", ("a",)), (["a", "b"], ("a", "b")), (("a",), ("a",)), ([], ())])
def test_options_take_one_stop_string_or_several(stop: Any, expected: tuple[str, ...]) -> None:
    assert request_of(stop=stop).stop == expected


def test_options_take_biases_as_a_mapping() -> None:
    assert request_of(logit_bias={65: 2.0, 66: -3}).sampling.logit_bias == ((65, 2.0), (66, -3))


@pytest.mark.parametrize(
    ("options", "param"),
    [
        ({"max_tokens": 1.5}, "max_tokens"),
        ({"max_tokens": "5"}, "max_tokens"),
        ({"stop": 5}, "stop"),
        ({"stop": [""]}, "stop"),
        ({"stop": ["a", None]}, "stop"),
        ({"stop": {"a": 1}}, "stop"),
        ({"ignore_eos": "yes"}, "ignore_eos"),
        ({"prompt_cache": 1}, "prompt_cache"),
        ({"priority": "high"}, "priority"),
        ({"logit_bias": {"65": 1.0}}, "logit_bias"),
        ({"logit_bias": [65]}, "logit_bias"),
        ({"temperature": "warm"}, "temperature"),
        ({"n": 2}, "n"),
    ],
)
def test_options_that_cannot_be_used_are_refused_by_name(options: dict[str, Any], param: str) -> None:
    with pytest.raises(RequestError) as caught:
        request_of(**options)
    assert caught.value.param == param
    assert param in str(caught.value) or "stop string" in str(caught.value)


@pytest.mark.parametrize("option", ["reasoning_budget", "reasoning_effort"])
def test_measures_of_reasoning_are_refused_by_name_where_there_is_none(option: str) -> None:
    """They were dropped without a word. A wish for no reasoning is granted."""
    one, thread = engine()
    with pytest.raises(CapabilityUnavailable) as caught:
        one.chat("Hi", **{option: 5 if option == "reasoning_budget" else "high"})
    assert caught.value.param == option
    assert not thread.requests
    one.chat("Hi", **{option: 0 if option == "reasoning_budget" else "none"})
    one.chat("Hi", thinking=False, **{option: 5 if option == "reasoning_budget" else "high"})
    assert len(thread.requests) == 2


@pytest.mark.parametrize("variables", [5, "x", ["x"], {5: 5}])
def test_template_variables_must_be_named(variables: Any) -> None:
    with pytest.raises(RequestError) as caught:
        engine()[0].chat("Hi", template_variables=variables)
    assert caught.value.param == "template_variables"


def test_open_with_an_empty_path_is_refused() -> None:
    """It opened the demo model."""
    with pytest.raises(ModelLoadError, match="the path is empty"):
        Engine.open("")
    with pytest.raises(ModelLoadError, match="the path is empty"):
        Engine.open(model_options=ModelOptions(model=""))


def test_engine_that_nobody_holds_is_closed() -> None:
    """Its thread kept the weights in memory until the program ended."""
    one, thread = engine()
    one.chat("Hi")
    gc.collect()
    assert not thread.is_closed
    del one
    gc.collect()
    assert thread.is_closed


def test_engine_lives_as_long_as_a_stream_of_it() -> None:
    one, thread = engine("Hello there.")
    stream = one.stream("Hi")
    del one
    gc.collect()
    assert not thread.is_closed
    assert "".join(segment.text for segment in stream) == "Hello there."
    del stream
    gc.collect()
    assert thread.is_closed


def test_engine_is_closed_when_the_program_ends() -> None:
    """A thread in mid-step aborted the interpreter, exit code 134."""
    program = (
        "from tests.portable.test_library import engine, text_side\n"
        "one, thread = engine()\n"
        "thread.close = lambda: print('closed')\n"
        "from troth.library import Engine\n"
        "two = Engine(thread, text_side())\n"
        "print('end')\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.split() == ["end", "closed"]


@pytest.mark.parametrize(
    ("last", "end", "continues"),
    [
        ({"role": "assistant", "content": "Once"}, "assistant: Once", True),
        ({"role": "assistant", "content": ""}, "assistant: ", False),
        ({"role": "user", "content": "More"}, "user: More\nassistant: ", False),
    ],
)
def test_final_answer_of_a_conversation_is_continued(last: dict[str, Any], end: str, continues: bool) -> None:
    one, thread = engine()
    one.chat([{"role": "user", "content": "Hi"}, last])
    request = thread.requests[0]
    assert bytes(request.prompt_ids).decode().endswith(end)
    assert (request.boundary is None) == continues
