"""Requests check themselves: what no engine could use is refused where it is made, by the name of its field."""

from __future__ import annotations

import math
from typing import Any

import pytest

from troth.contracts.bounds import require_flag, require_number, shown
from troth.contracts.names import RequestId
from troth.contracts.request import Request
from troth.contracts.sampling import SamplingParams
from troth.errors import RequestError

# Python itself refuses to write integers of so many digits, test names included.
HUGE = pytest.param(10**5000, id="huge")
NEGATIVE = pytest.param(-(10**5000), id="negative")
LONG = "x" * 10**5


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("max_tokens", 0),
        ("max_tokens", -1),
        ("max_tokens", 1.5),
        ("max_tokens", "5"),
        ("max_tokens", True),
        ("max_tokens", math.nan),
        ("max_tokens", 10**30),
        pytest.param("max_tokens", 10**5000, id="max_tokens-huge"),
        ("priority", "high"),
        ("priority", 0.5),
        ("priority", 2**64),
        ("prompt_cache", "no"),
        ("continues_text", 1),
        ("echo_special", None),
        ("stop", "text"),
        ("stop", ("",)),
        ("stop", ("a", 5)),
        ("stop", 5),
        ("stop", ["a"]),
    ],
)
def test_request_refuses_what_no_engine_could_use(field: str, value: Any) -> None:
    """A float in max_tokens once reached the scheduler and ended the engine, with every other request in it."""
    with pytest.raises(RequestError) as caught:
        Request(request_id=RequestId("r"), prompt_ids=(1,), **{field: value})
    assert caught.value.param == field
    assert field in str(caught.value) or "stop string" in str(caught.value)
    assert len(str(caught.value)) < 250


@pytest.mark.parametrize(
    "bias",
    [5, "ab", {1: 2.0}, [(1, 2.0)], ((1,),), ((1, 2, 3),), (1, 2), (("1", 2.0),), ((1, "2"),), ((1, math.nan),)],
)
def test_sampling_refuses_biases_that_are_no_pairs(bias: Any) -> None:
    with pytest.raises(RequestError) as caught:
        SamplingParams(logit_bias=bias)
    assert caught.value.param == "logit_bias"


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, 1e308, -0.1, 10**400, HUGE, NEGATIVE])
def test_sampling_refuses_numbers_of_any_size_outside_the_bounds(value: float) -> None:
    """Integers that no float holds raised OverflowError instead."""
    with pytest.raises(RequestError, match="temperature must be between 0 and 100, not ") as caught:
        SamplingParams(temperature=value)
    assert caught.value.param == "temperature"


@pytest.mark.parametrize(("value", "greedy"), [(0.0, True), (-0.0, True), (5e-324, True), (1e-45, True), (1e-9, False)])
def test_sampling_temperature_too_small_for_float32_is_greedy(value: float, greedy: bool) -> None:
    assert SamplingParams(temperature=value).is_greedy is greedy


def test_bounds_accept_their_edges() -> None:
    for value in (0, 0.0, 1, 1.0):
        require_number("top_p", value, 0.0, 1.0)
    require_flag("ignore_eos", False)


@pytest.mark.parametrize("value", [LONG, LONG.encode(), [LONG] * 9, HUGE, {1: LONG}, 3.5, None])
def test_shown_values_are_short(value: object) -> None:
    assert 1 <= len(shown(value)) < 100
