"""A model's recommended sampling, and a request's values over it."""

from __future__ import annotations

from typing import Any

import pytest

from troth.errors import ModelLoadError, RequestError
from troth.text.defaults import FALLBACK_TEMPERATURE, GenerationDefaults


def test_defaults_of_a_model_without_any_are_a_mild_temperature() -> None:
    sampling = GenerationDefaults.from_config({}).sampling()
    assert (sampling.temperature, sampling.top_p, sampling.top_k) == (FALLBACK_TEMPERATURE, 1.0, 0)


def test_defaults_are_those_of_the_file() -> None:
    config = {
        "do_sample": True,
        "temperature": 0.6,
        "top_p": 0.95,
        "top_k": 20,
        "min_p": 0.05,
        "repetition_penalty": 1.1,
        "eos_token_id": [1, 2],
        "max_new_tokens": 7,
    }
    sampling = GenerationDefaults.from_config(config).sampling()
    values = (sampling.temperature, sampling.top_p, sampling.top_k, sampling.min_p, sampling.repetition_penalty)
    assert values == (0.6, 0.95, 20, 0.05, 1.1)


@pytest.mark.parametrize("config", [{"do_sample": False}, {"do_sample": False, "temperature": 0.9}])
def test_defaults_of_a_model_that_does_not_sample_are_greedy(config: dict[str, Any]) -> None:
    assert GenerationDefaults.from_config(config).sampling().is_greedy


def test_defaults_give_way_to_what_the_request_gives() -> None:
    defaults = GenerationDefaults.from_config({"temperature": 0.6, "top_k": 20, "top_p": None})
    sampling = defaults.sampling(temperature=0.0, top_k=None, seed=7)
    assert (sampling.temperature, sampling.top_k, sampling.top_p, sampling.seed) == (0.0, 20, 1.0, 7)


def test_defaults_are_the_same_for_every_request() -> None:
    defaults = GenerationDefaults.from_config({"temperature": 0.6})
    defaults.sampling(temperature=1.0)
    assert defaults.sampling().temperature == 0.6


@pytest.mark.parametrize(
    ("config", "field"),
    [({"temperature": -1}, "temperature"), ({"top_p": "0.9"}, "top_p"), ({"top_k": 1.5}, "top_k")],
)
def test_defaults_that_cannot_be_used_fail_to_load(config: dict[str, Any], field: str) -> None:
    with pytest.raises(ModelLoadError) as caught:
        GenerationDefaults.from_config(config, path="m/generation_config.json")
    assert (caught.value.path, caught.value.field) == ("m/generation_config.json", field)


def test_defaults_refuse_an_option_that_is_none() -> None:
    with pytest.raises(RequestError) as caught:
        GenerationDefaults.from_config({}).sampling(temprature=1.0)
    assert caught.value.param == "temprature"
    with pytest.raises(RequestError) as caught:
        GenerationDefaults.from_config({}).sampling(top_p=2.0)
    assert caught.value.param == "top_p"
