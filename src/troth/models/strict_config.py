"""Reading a model's configuration so that nothing which could change the maths is overlooked.

A family asks for each key it knows. ``finish`` then raises on every key nobody asked for, unless it is listed as having
no effect on a forward pass.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, Final, TypeVar

from troth.errors import ModelLoadError

T = TypeVar("T")

INERT: Final = frozenset(
    {
        # Says who made the file, how it was trained or how generation is driven; no forward pass reads it.
        "_name_or_path", "architectures", "attention_dropout", "bos_token_id", "chunk_size_feed_forward", "dtype",
        "embd_pdrop", "eos_token_id", "finetuning_task", "gradient_checkpointing", "hidden_dropout", "id2label",
        "initializer_range", "is_decoder", "is_encoder_decoder", "is_llama_config", "label2id", "model_type",
        "output_attentions", "output_hidden_states", "pad_token_id", "problem_type", "resid_pdrop", "return_dict",
        "task_specific_params", "tokenizer_class", "torch_dtype", "transformers_version", "transformers.js_config",
        "unk_token_id", "use_cache", "quantization_config_note", "unsloth_fixed", "unsloth_version",
    }
)  # fmt: skip


class StrictConfig:
    """A mapping that knows which of its keys were read.

    Args:
        values: config.json, or the keys of one architecture in a GGUF header with their prefix removed.
        path: named in errors.
    """

    def __init__(self, values: Mapping[str, Any], path: str) -> None:
        self._values = values
        self._path = path
        self._read: set[str] = set()

    def integer(self, key: str, default: int | None = None, *, least: int = 1) -> int:
        """An integer of at least ``least``; missing or null takes the default, or raises when there is none."""
        value = self._value(key, default)
        if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= 2**31:
            raise self.error(key, f"must be an integer of at least {least}, not {value!r}")
        return value

    def number(self, key: str, default: float | None = None) -> float:
        """A finite positive number."""
        value = self._value(key, default)
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < float("inf"):
            raise self.error(key, f"must be a positive number, not {value!r}")
        return float(value)

    def flag(self, key: str, default: bool) -> bool:
        """true or false."""
        value = self._value(key, default)
        if not isinstance(value, bool):
            raise self.error(key, f"must be true or false, not {value!r}")
        return value

    def one_of(self, key: str, allowed: Iterable[T], default: T | None = None) -> T:
        """A value this family implements; anything else is refused by name."""
        value = self._value(key, default)
        choices = tuple(allowed)
        for choice in choices:
            if value == choice and type(value) is type(choice):
                return choice
        raise self.error(key, f"{value!r} is not supported; supported: {', '.join(map(repr, choices))}")

    def mapping(self, key: str) -> Mapping[str, Any] | None:
        """An object, or None when missing or null."""
        value = self._value(key, None, optional=True)
        if value is not None and not isinstance(value, Mapping):
            raise self.error(key, f"must be an object, not {value!r}")
        return value

    def strings(self, key: str) -> list[str] | None:
        """A list of strings, or None when missing or null."""
        value = self._value(key, None, optional=True)
        if value is None:
            return None
        if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
            raise self.error(key, f"must be a list of strings, not {value!r}")
        return value

    def optional(self, key: str) -> Any:
        """The raw value, or None; the caller checks it."""
        return self._value(key, None, optional=True)

    def finish(self, inert: Iterable[str] = ()) -> None:
        """Raise on keys that were not read and are not known to be without effect.

        Raises:
            ModelLoadError: naming them.
        """
        unknown = sorted(
            key
            for key, value in self._values.items()
            if key not in self._read and key not in INERT and key not in set(inert) and value is not None
        )
        if unknown:
            raise ModelLoadError(
                f"keys this family does not know and which could change its results: {', '.join(unknown)}",
                path=self._path,
            )

    def error(self, key: str, problem: str) -> ModelLoadError:
        """The error to raise for what the caller found wrong with a key."""
        return ModelLoadError(problem, path=self._path, field=key)

    def _value(self, key: str, default: Any, *, optional: bool = False) -> Any:
        self._read.add(key)
        value = self._values.get(key)
        if value is None:
            value = default
        if value is None and not optional:
            raise self.error(key, "is missing")
        return value
