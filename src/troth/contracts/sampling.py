"""How one request wants its tokens drawn: values and their bounds. The maths is in ``ops/sample.py``."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from troth.contracts.bounds import mistyped, require_integer, require_number
from troth.errors import RequestError

MAX_TOP_LOGPROBS: Final = 20
MAX_TEMPERATURE: Final = 100.0
MAX_LOGIT_BIAS: Final = 100.0
GREEDY_BELOW: Final = 1e-30
"""Temperatures below it are 0: dividing logits by one would leave float32."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """Sampling values of one request, validated on construction.

    The order of use is fixed: penalties and logit bias, log-probability capture, temperature, top-k, top-p,
    min-p, XTC, keyed draw. ``temperature == 0`` is argmax with the lowest id on ties.

    Raises:
        RequestError: a value is out of bounds; ``param`` names it.
    """

    temperature: float = 1.0
    top_p: float = 1.0
    """Nucleus mass in (0, 1]; 1 is off. The token that crosses the mass is kept."""
    top_k: int = 0
    """Keep the k best logits, ties at the threshold kept; 0 is off."""
    min_p: float = 0.0
    """Drop tokens less likely than min_p times the best one; 0 is off."""
    xtc_probability: float = 0.0
    """Chance per token that every candidate above xtc_threshold but the least likely one is dropped."""
    xtc_threshold: float = 0.1
    repetition_penalty: float = 1.0
    """Divides positive and multiplies negative logits of tokens in prompt or output (Keskar et al. 2019)."""
    presence_penalty: float = 0.0
    """Subtracted once from each token present in the output."""
    frequency_penalty: float = 0.0
    """Subtracted from each token once per time it is in the output."""
    logit_bias: tuple[tuple[int, float], ...] = ()
    """(token id, value added to its logit) pairs, values -100..100, each id at most once."""
    seed: int = 0
    """Key of the draws, 0 <= seed < 2**64. A request without one gets a random seed before it comes here."""
    logprobs: int | None = None
    """None: no log-probabilities. n >= 0: of each sampled token, and of the n most likely ones."""
    prompt_logprobs: int | None = None
    """As ``logprobs``, for every prompt token after the first."""

    def __post_init__(self) -> None:
        require_number("temperature", self.temperature, 0.0, MAX_TEMPERATURE)
        require_number("top_p", self.top_p, 0.0, 1.0)
        if self.top_p == 0.0:
            raise RequestError("top_p must be above 0; use temperature 0 for greedy decoding", param="top_p")
        require_integer("top_k", self.top_k, 0, 2**31 - 1)
        require_number("min_p", self.min_p, 0.0, 1.0)
        require_number("xtc_probability", self.xtc_probability, 0.0, 1.0)
        require_number("xtc_threshold", self.xtc_threshold, 0.0, 1.0)
        require_number("repetition_penalty", self.repetition_penalty, 0.01, 100.0)
        require_number("presence_penalty", self.presence_penalty, -2.0, 2.0)
        require_number("frequency_penalty", self.frequency_penalty, -2.0, 2.0)
        require_integer("seed", self.seed, 0, 2**64 - 1)
        for name in ("logprobs", "prompt_logprobs"):
            value = getattr(self, name)
            if value is not None:
                require_integer(name, value, 0, MAX_TOP_LOGPROBS)
        _require_biases(self.logit_bias)
        if len({token_id for token_id, _ in self.logit_bias}) < len(self.logit_bias):
            raise RequestError("logit_bias names a token id twice", param="logit_bias")

    @property
    def is_greedy(self) -> bool:
        """Whether the draw is a plain argmax."""
        return self.temperature < GREEDY_BELOW

    @property
    def needs_history(self) -> bool:
        """Whether logits depend on the tokens seen so far."""
        return self.repetition_penalty != 1.0 or self.presence_penalty != 0.0 or self.frequency_penalty != 0.0


def _require_biases(biases: object) -> None:
    wanted = "pairs of token id and bias"
    if not isinstance(biases, tuple):
        raise mistyped("logit_bias", wanted, biases)
    for pair in biases:
        if not isinstance(pair, tuple) or len(pair) != 2:
            raise mistyped("logit_bias", wanted, pair)
        require_integer("logit_bias", pair[0], 0, 2**31 - 1)
        require_number("logit_bias", pair[1], -MAX_LOGIT_BIAS, MAX_LOGIT_BIAS)
