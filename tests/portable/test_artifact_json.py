"""JSON from files nobody vouches for: what is refused, and that refusing stays cheap."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from troth.artifact.json_file import MAX_JSON_DEPTH, MAX_JSON_VALUES, parse_json_object, read_json_object
from troth.errors import ModelLoadError

PATH = Path("config.json")


def refusal(raw: bytes) -> str:
    with pytest.raises(ModelLoadError) as caught:
        parse_json_object(raw, PATH, field="place")
    assert caught.value.path == "config.json"
    assert caught.value.field == "place"
    return str(caught.value)


def nested(depth: int) -> bytes:
    """An object with ``depth`` levels of nesting in all."""
    return b'{"a":' + b"[" * (depth - 1) + b"]" * (depth - 1) + b"}"


def test_parse_json_object_returns_the_object_as_it_is() -> None:
    text = '{"a": [1, 2.5, null, true], "b": {"c": "\\u00e9\\"]["}, "limit": [0.0, Infinity, -Infinity]}'
    assert parse_json_object(text.encode(), PATH) == {
        "a": [1, 2.5, None, True],
        "b": {"c": 'é"]['},
        "limit": [0.0, math.inf, -math.inf],
    }


@pytest.mark.parametrize(
    ("raw", "words"),
    [
        (b"", "not JSON"),
        (b"[]", "holds a list"),
        (b'"text"', "holds a str"),
        (b"null", "holds a NoneType"),
        (b'{"a": 1', "not JSON"),
        (b'{"a": 1} x', "not JSON"),
        (b'{"a": 1, "a": 2}', "'a' is there twice"),
        (b'{"outer": {"b": 1, "b": 1}}', "'b' is there twice"),
        (b'{"a": NaN}', "NaN"),
        (b'{"a": "\xff"}', "not JSON"),
        (b"\xef\xbb\xbf{}", "not JSON"),
        (b'{"a": ' + b"9" * 5000 + b"}", "not JSON"),
        (nested(MAX_JSON_DEPTH + 1), "nested more than 64 levels"),
        (b"[" * 10**5, "nested more than 64 levels"),
        (b'{"a":' * 10**5, "nested more than 64 levels"),
        (b"[" + b"0," * MAX_JSON_VALUES + b"0]", "values"),
        (b"[" + b"[]," * MAX_JSON_VALUES + b"0]", "values"),
    ],
)
def test_parse_json_object_refuses_what_is_no_bounded_object(raw: bytes, words: str) -> None:
    assert words in refusal(raw)


def test_parse_json_object_accepts_the_deepest_nesting_and_brackets_in_strings() -> None:
    assert parse_json_object(nested(MAX_JSON_DEPTH), PATH)
    text = {"a": "[{" * 1000, 'quote " and \\': "}]" * 1000}
    assert parse_json_object(json.dumps(text).encode(), PATH) == text


@pytest.mark.timeout(60)
@pytest.mark.parametrize(
    "raw",
    [
        b'{"' + b'\\"' * 1_000_000,
        b'{"' + b"a" * 2_000_000,
        b'"' * 2_000_000,
        b"\\" * 2_000_000,
        b'{"a": 0.' + b"1" * 1_000_000 + b"}x",
    ],
    ids=["escaped quotes", "unclosed string", "quotes", "backslashes", "long number"],
)
def test_parse_json_object_takes_linear_time_on_hostile_strings(raw: bytes) -> None:
    """A scan that restarted at every quote of an unclosed string would take hours here."""
    assert "not JSON" in refusal(raw)


def test_read_json_object_refuses_a_file_above_its_limit(tmp_path: Path) -> None:
    path = tmp_path / "big.json"
    path.write_bytes(b'{"a": 1}')
    assert read_json_object(path, limit_bytes=8) == {"a": 1}
    with pytest.raises(ModelLoadError, match="8 bytes long; at most 7"):
        read_json_object(path, limit_bytes=7)


@settings(max_examples=100, deadline=None, database=None)
@given(raw=st.one_of(st.binary(max_size=40), st.text(alphabet='{}[]:,"\\ 019.eE-+nulltruefsNaInfity', max_size=60)))
def test_parse_json_object_returns_an_object_or_raises_model_load_error(raw: bytes | str) -> None:
    data = raw.encode() if isinstance(raw, str) else raw
    try:
        value = parse_json_object(data, PATH)
    except ModelLoadError:
        return
    assert value == json.loads(data)
