"""Owns the sampling a model asks for when a request says nothing: its ``generation_config.json``.

Knows no request. Read next: ``contracts/sampling.py`` (what the values mean).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Final, Self

from troth.contracts.sampling import SamplingParams
from troth.errors import ModelLoadError, RequestError

FALLBACK_TEMPERATURE: Final = 0.7
_NAMES: Final = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")


@dataclass(frozen=True, slots=True)
class GenerationDefaults:
    """The sampling values a model's authors recommend, by the names of ``SamplingParams``."""

    values: Mapping[str, Any]

    @classmethod
    def from_config(cls, config: Mapping[str, Any], *, path: str = "generation_config.json") -> Self:
        """Read them from a ``generation_config.json``; from an empty one where a model has none.

        ``do_sample`` false means greedy. Where no temperature is given it is 0.7: most who leave it out never
        thought of it, and their models ramble at 1.

        Raises:
            ModelLoadError: a value that cannot be used.
        """
        values = {"temperature": FALLBACK_TEMPERATURE}
        values |= {name: config[name] for name in _NAMES if config.get(name) is not None}
        if config.get("do_sample") is False:
            values["temperature"] = 0.0
        try:
            SamplingParams(**values)  # type: ignore[arg-type]  # it checks types and bounds itself
        except RequestError as error:
            raise ModelLoadError(str(error), path=path, field=error.param or "") from error
        return cls(MappingProxyType(values))

    def sampling(self, **given: Any) -> SamplingParams:
        """Sampling of a request that gives these values; None means not given.

        Raises:
            RequestError: a value out of bounds, or a name that is no sampling value.
        """
        unknown = given.keys() - SamplingParams.__dataclass_fields__.keys()
        if unknown:
            name = min(unknown)
            raise RequestError(f"{name} is no sampling option", param=name)
        return SamplingParams(**{**self.values, **{name: value for name, value in given.items() if value is not None}})
