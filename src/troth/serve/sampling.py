"""Sampling values, limits and stop strings of a request body, the same for every OpenAI endpoint.

Refuses to know messages and prompts. Bounds live in ``contracts/sampling.py``; this file reads types and names
fields. Read next: ``openai_chat.py``.
"""

from __future__ import annotations

import secrets
from dataclasses import dataclass, replace
from typing import Any, Final

from troth.contracts.bounds import mistyped_json
from troth.contracts.sampling import SamplingParams
from troth.contracts.speculation import Speculation
from troth.errors import RequestError
from troth.serve.fields import INT64, Fields
from troth.serve.grammar import Wanted, read_grammar
from troth.serve.model import ServedModel

MAX_STOPS: Final = 16
MAX_STOP_CHARACTERS: Final = 1024
MAX_CHOICES: Final = 128
MAX_SALT: Final = 256
"""Characters: a name or a digest of one."""
_SEED_BITS: Final = 53
"""Random seeds stay exact in clients whose numbers are 64-bit floats."""
_CHOICE_STRIDE: Final = 0x9E3779B97F4A7C15
"""2**64 divided by the golden ratio, odd: seeds of neighbouring requests and choices never meet by accident."""
_FLOATS: Final = (
    "temperature",
    "top_p",
    "min_p",
    "xtc_probability",
    "xtc_threshold",
    "repetition_penalty",
    "presence_penalty",
    "frequency_penalty",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Wishes:
    """What one body asks of the engine, whatever its prompt is."""

    sampling: SamplingParams
    seed: int
    max_tokens: int | None
    stop: tuple[str, ...]
    num_choices: int
    ignore_eos: bool
    stream: bool
    include_usage: bool
    include_progress: bool
    prompt_cache: bool = True
    cache_salt: str = ""
    grammar: Wanted | None = None
    speculation: Speculation | None = None
    """How drafts are made; None: as the engine does."""

    def sampling_of(self, choice: int) -> SamplingParams:
        """Sampling of the choice with this index: its own seed, derived from the request's; choice 0 has just that."""
        return replace(self.sampling, seed=(self.seed + choice * _CHOICE_STRIDE) % 2**64)


def read_wishes(fields: Fields, model: ServedModel) -> Wishes:
    """Read everything but the prompt and log-probabilities. Raises RequestError."""
    given: dict[str, Any] = {name: fields.number(name) for name in _FLOATS}
    given["top_k"] = _top_k(fields)
    given["logit_bias"] = _logit_bias(fields, model.tokenizer.vocab_size)
    seed = fields.integer("seed", -INT64 - 1, 2**64 - 1)
    options = fields.object("stream_options") or Fields({})
    wishes = Wishes(
        sampling=replace(model.defaults, **{name: value for name, value in given.items() if value is not None}),
        # A negative seed is read as the same 64 bits without sign.
        seed=secrets.randbits(_SEED_BITS) if seed is None else seed % 2**64,
        max_tokens=_max_tokens(fields),
        stop=_stop(fields),
        num_choices=fields.integer("n", 1, MAX_CHOICES) or 1,
        ignore_eos=fields.flag("ignore_eos"),
        stream=fields.flag("stream"),
        include_usage=options.flag("include_usage"),
        include_progress=options.flag("include_progress"),
        prompt_cache=fields.flag("prompt_cache", True),
        cache_salt=_cache_salt(fields),
        grammar=read_grammar(fields),
    )
    return wishes


def _cache_salt(fields: Fields) -> str:
    salt = fields.text("cache_salt") or ""
    if len(salt) > MAX_SALT:
        raise RequestError(f"cache_salt has {len(salt)} characters; at most {MAX_SALT} are taken", param="cache_salt")
    return salt


def _top_k(fields: Fields) -> int | None:
    top_k = fields.integer("top_k", -1, 2**31 - 1)
    return 0 if top_k == -1 else top_k


def _max_tokens(fields: Fields) -> int | None:
    older = fields.integer("max_tokens", 1)
    newer = fields.integer("max_completion_tokens", 1)
    if older is not None and newer is not None and older != newer:
        raise RequestError(
            f"max_tokens is {older} but max_completion_tokens is {newer}; send one of them",
            param="max_completion_tokens",
        )
    return older if newer is None else newer


def _stop(fields: Fields) -> tuple[str, ...]:
    value = fields.raw("stop")
    if value is None:
        return ()
    stops = [value] if isinstance(value, str) else value
    if not isinstance(stops, list) or not all(isinstance(stop, str) for stop in stops):
        raise mistyped_json(fields.name("stop"), "a string or an array of strings", value)
    if len(stops) > MAX_STOPS:
        raise RequestError(f"stop has {len(stops)} strings; at most {MAX_STOPS} are allowed", param="stop")
    for stop in stops:
        if not 1 <= len(stop) <= MAX_STOP_CHARACTERS:
            raise RequestError(
                f"a stop string must have 1 to {MAX_STOP_CHARACTERS} characters, not {len(stop)}",
                param="stop",
            )
    return tuple(stops)


def _logit_bias(fields: Fields, vocab_size: int) -> tuple[tuple[int, float], ...] | None:
    biases = fields.object("logit_bias")
    if biases is None:
        return None
    pairs: dict[int, float] = {}
    for key, _ in biases.items():
        if not (key.isascii() and key.isdigit() and len(key) < 20 and int(key) < vocab_size):
            raise RequestError(
                f"logit_bias names {key[:40]!r}; its keys must be token ids, 0 to {vocab_size - 1}",
                param="logit_bias",
            )
        pairs[int(key)] = biases.number(key) or 0.0
    return tuple(sorted(pairs.items()))
