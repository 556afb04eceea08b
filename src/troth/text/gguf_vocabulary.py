"""Owns the vocabulary arrays of GGUF metadata, checked against each other before anyone uses them.

Knows no file and no tokenization. Format: GGUF specification (ggml ``docs/gguf.md``), keys ``tokenizer.ggml.*``.
Read next: ``gguf_tokenizer.py``.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import IntEnum
from typing import Any, Final

from troth.errors import ModelLoadError

PREFIX: Final = "tokenizer.ggml."
MAX_CHARACTERS: Final = 2**24
"""Of all tokens together, ten times what the largest vocabularies have: building an encoder takes 2 us for each."""


class TokenKind(IntEnum):
    """``tokenizer.ggml.token_type``."""

    NORMAL = 1
    UNKNOWN = 2
    CONTROL = 3
    USER_DEFINED = 4
    UNUSED = 5
    BYTE = 6


@dataclass(frozen=True, slots=True)
class GgufVocabulary:
    """The tokens of a file and typed access to the keys about them."""

    metadata: Mapping[str, Any]
    path: str
    model: str
    tokens: list[str]
    kinds: list[int]

    @classmethod
    def read(cls, metadata: Mapping[str, Any], path: str) -> GgufVocabulary:
        """Check model, tokens and kinds. Raises ModelLoadError."""
        vocabulary = cls(metadata, path, str(metadata.get(f"{PREFIX}model")), [], [])
        tokens = vocabulary.array("tokens", str)
        if not tokens:
            raise vocabulary.error("is missing or empty; this file has no vocabulary", "tokens")
        num_characters = sum(map(len, tokens))
        if num_characters > MAX_CHARACTERS:
            raise vocabulary.error(f"has {num_characters} characters; {MAX_CHARACTERS} are allowed", "tokens")
        kinds = vocabulary.array("token_type", int) or [TokenKind.NORMAL] * len(tokens)
        if len(kinds) != len(tokens):
            raise vocabulary.error(f"has {len(kinds)} entries for {len(tokens)} tokens", "token_type")
        return cls(metadata, path, vocabulary.model, tokens, kinds)

    def error(self, message: str, name: str) -> ModelLoadError:
        """What to raise about the key ``name``."""
        return ModelLoadError(message, path=self.path, field=PREFIX + name)

    def get(self, name: str) -> Any:
        """The value of a key, None when it is not there."""
        return self.metadata.get(PREFIX + name)

    def array(self, name: str, kind: type[Any]) -> list[Any]:
        """A list whose items are all of ``kind``; empty when the key is not there. Raises ModelLoadError."""
        value = self.get(name)
        if value is None:
            return []
        if not isinstance(value, list) or not all(isinstance(item, kind) for item in value):
            raise self.error(f"is not a list of {kind.__name__}", name)
        return value

    def flag(self, name: str, default: bool) -> bool:
        """A boolean. Raises ModelLoadError."""
        value = self.get(name)
        if value is None:
            return default
        if not isinstance(value, bool):
            raise self.error(f"is {value!r}, not a boolean", name)
        return value

    def id_of(self, name: str, default: int | None) -> int | None:
        """The id in ``<name>_token_id``; None when it is not one of the vocabulary. Raises ModelLoadError."""
        key = f"{name}_token_id"
        value = self.get(key)
        token_id = default if value is None else value
        if token_id is None:
            return None
        if not isinstance(token_id, int) or isinstance(token_id, bool):
            raise self.error(f"is {token_id!r}, not a token id", key)
        return token_id if 0 <= token_id < len(self.tokens) else None

    def ids_of(self, *kinds: TokenKind) -> list[int]:
        """The ids of these kinds, ascending."""
        return [token_id for token_id, kind in enumerate(self.kinds) if kind in kinds]

    def merges(self) -> list[tuple[str, str]]:
        """The merge rules; in each string the first space after the first character parts the two tokens.

        Raises:
            ModelLoadError: no rules, or one without such a space.
        """
        rules: list[str] = self.array("merges", str)
        if not rules:
            raise self.error("is missing; convert the model again", "merges")
        try:
            return [(rule[:cut], rule[cut + 1 :]) for rule in rules for cut in (rule.index(" ", 1),)]
        except ValueError as error:
            raise self.error("has a rule that is not two tokens with a space between", "merges") from error

    def scores(self) -> list[float]:
        """One score per token. Raises ModelLoadError when they cannot order the merges."""
        scores: list[float] = self.array("scores", float)
        if len(scores) != len(self.tokens):
            raise self.error(f"has {len(scores)} entries for {len(self.tokens)} tokens", "scores")
        if len({scores[i] for i in self.ids_of(TokenKind.NORMAL) if len(self.tokens[i]) > 1}) == 1:
            raise self.error("is the same for all tokens and orders no merges; convert the model again", "scores")
        return scores
