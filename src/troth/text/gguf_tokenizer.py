"""Owns the GGUF form of a tokenizer: the ``tokenizer.ggml.*`` metadata of a file, taken as a plain mapping.

Knows no file: ``artifact/gguf.py`` reads it. Format: GGUF specification (ggml ``docs/gguf.md``), token types 1 normal,
2 unknown, 3 control, 4 user defined, 5 unused, 6 byte. Read next: ``pretokenizers.py``, ``tokenizer.py``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from troth.errors import ModelLoadError
from troth.text.pretokenizers import PRETOKENIZERS
from troth.text.tokenizer import Tokenizer
from troth.text.vocabulary import (
    WORD_MARK,
    Vocabulary,
    byte_level_bytes,
    end_ids,
    sentencepiece_bytes,
    wordpiece_bytes,
)

if TYPE_CHECKING:
    from tokenizers import Tokenizer as Encoder

_NORMAL: Final = 1
_UNKNOWN: Final = 2
_CONTROL: Final = 3
_USER_DEFINED: Final = 4
_PREFIX: Final = "tokenizer.ggml."


def tokenizer_from_gguf(metadata: Mapping[str, Any], *, template: str | None = None) -> Tokenizer:
    """The tokenizer that GGUF metadata describes.

    Args:
        metadata: Key -> value of the file, arrays as sequences.
        template: Source of the chat template, which decides which end-of-turn tokens end an answer.

    Raises:
        ModelLoadError: a tokenizer model or ``pre`` this package does not know, or damaged arrays.
    """
    table = _Table.read(metadata)
    match table.model:
        case "gpt2":
            encoder, add_bos = _byte_level(table)
        case "llama":
            encoder, add_bos = _scored(table)
        case "gemma4":
            encoder, add_bos = _sentencepiece(table, table.merges(), space_prefix=False), True
        case "bert":
            return _bert(table, template)
        case other:
            known = "gpt2, llama, gemma4, bert"
            raise ModelLoadError(
                f"tokenizer model {other!r} is not supported ({known} are)", field=f"{_PREFIX}model"
            )
    to_bytes = byte_level_bytes if table.model == "gpt2" else sentencepiece_bytes
    default_bos, default_eos, default_unknown = (1, 2, 0) if table.model == "llama" else (None, None, None)
    bos = table.special_id("bos", default_bos)
    eos = table.special_id("eos", default_eos)
    _add_tokens(encoder, table)
    around = _Around(
        before=bos if table.flag("add_bos_token", add_bos) else None,
        after=eos if table.flag("add_eos_token", False) else None,
    )
    around.install(encoder, table)
    control = {table.tokens[i]: i for i in table.ids_of(_CONTROL)}
    declared = [
        i for i in (eos, table.special_id("eot", None), table.special_id("eom", None)) if i is not None
    ]
    vocabulary = Vocabulary(
        token_bytes=tuple(
            token.encode() if kind == _CONTROL else to_bytes(token)
            for token, kind in zip(table.tokens, table.kinds, strict=True)
        ),
        special_ids=frozenset((*control.values(), *table.ids_of(_UNKNOWN))),
        unknown_id=table.special_id("unknown", default_unknown),
        bos_id=bos,
        eos_id=eos,
        eos_ids=end_ids(declared, control, template, len(table.tokens)),
        drops_first_space=table.model == "llama" and table.flag("add_space_prefix", True),
    )
    return Tokenizer(encoder, vocabulary)


@dataclass(frozen=True, slots=True)
class _Table:
    """The vocabulary arrays, checked against each other."""

    metadata: Mapping[str, Any]
    model: str
    tokens: Sequence[str]
    kinds: Sequence[int]

    @classmethod
    def read(cls, metadata: Mapping[str, Any]) -> _Table:
        tokens = metadata.get(f"{_PREFIX}tokens")
        if (
            not isinstance(tokens, Sequence)
            or not tokens
            or not all(isinstance(token, str) for token in tokens)
        ):
            raise ModelLoadError(
                "must be a list of token texts; this file has no vocabulary", field=f"{_PREFIX}tokens"
            )
        kinds = metadata.get(f"{_PREFIX}token_type")
        kinds = [_NORMAL] * len(tokens) if kinds is None else [int(kind) for kind in kinds]
        if len(kinds) != len(tokens):
            raise ModelLoadError(
                f"has {len(kinds)} entries for {len(tokens)} tokens", field=f"{_PREFIX}token_type"
            )
        return cls(metadata, str(metadata.get(f"{_PREFIX}model")), tokens, kinds)

    def get(self, name: str) -> Any:
        return self.metadata.get(_PREFIX + name)

    def flag(self, name: str, default: bool) -> bool:
        value = self.get(name)
        return default if value is None else bool(value)

    def special_id(self, name: str, default: int | None) -> int | None:
        value = self.get(f"{name}_token_id")
        token_id = default if value is None else int(value)
        return token_id if token_id is not None and 0 <= token_id < len(self.tokens) else None

    def ids_of(self, *kinds: int) -> list[int]:
        return [i for i, kind in enumerate(self.kinds) if kind in kinds]

    def merges(self) -> list[tuple[str, str]]:
        """The merge rules; in each string the first space after the first character parts the two halves."""
        rules = self.get("merges")
        if rules is None:
            raise ModelLoadError("is missing; convert the model again", field=f"{_PREFIX}merges")
        try:
            return [(rule[:cut], rule[cut + 1 :]) for rule in rules for cut in (rule.index(" ", 1),)]
        except ValueError as error:
            raise ModelLoadError(
                "has a rule that is not two tokens with a space between", field=f"{_PREFIX}merges"
            ) from error


def _byte_level(table: _Table) -> tuple[Encoder, bool]:
    from tokenizers import Regex
    from tokenizers.pre_tokenizers import ByteLevel, Sequence, Split

    name = table.get("pre")
    rule = PRETOKENIZERS.get(str(name))
    if rule is None:
        known = ", ".join(PRETOKENIZERS)
        raise ModelLoadError(f"pre-tokenizer {name!r} is not known ({known} are)", field=f"{_PREFIX}pre")
    encoder = _bpe(table, table.merges(), ignore_merges=rule.ignore_merges)
    splits = [Split(Regex(pattern), "isolated") for pattern in rule.patterns]
    encoder.pre_tokenizer = Sequence([*splits, ByteLevel(add_prefix_space=False, use_regex=False)])
    return encoder, rule.add_bos


def _scored(table: _Table) -> tuple[Encoder, bool]:
    if table.flag("remove_extra_whitespaces", False):
        raise ModelLoadError("true is not supported", field=f"{_PREFIX}remove_extra_whitespaces")
    merges = merges_from_scores(table.tokens, table.kinds, _scores(table))
    return _sentencepiece(table, merges, space_prefix=table.flag("add_space_prefix", True)), True


def _scores(table: _Table) -> list[float]:
    scores = table.get("scores")
    field = f"{_PREFIX}scores"
    if scores is None or len(scores) != len(table.tokens):
        num_scores = 0 if scores is None else len(scores)
        raise ModelLoadError(f"has {num_scores} entries for {len(table.tokens)} tokens", field=field)
    values = [float(score) for score in scores]
    if len({values[i] for i in table.ids_of(_NORMAL) if len(table.tokens[i]) > 1}) == 1:
        raise ModelLoadError("are all equal, so they order no merges; convert the model again", field=field)
    return values


def merges_from_scores(
    tokens: Sequence[str], kinds: Sequence[int], scores: Sequence[float]
) -> list[tuple[str, str]]:
    """Merge rules by which pair-driven BPE gives exactly what SentencePiece's score-driven merging gives.

    SentencePiece joins, again and again, the two neighbours whose joined text is the token of the highest score, the
    leftmost of equals. So: every split of every normal token into two of them is a rule, best score first. Rules of
    one token never compete. What happens inside a stretch of text that ends up as token T does not depend on its
    surroundings (nothing else touched it, and order inside is order overall), so T is always made from one and the
    same pair; were another of its splits adjacent too, it would have to be that pair as well. Different tokens of
    equal score keep the order of their ids, where SentencePiece would take the leftmost; trained vocabularies only
    have such ties between runs of spaces.
    """
    order = sorted(
        (i for i, kind in enumerate(kinds) if kind == _NORMAL), key=scores.__getitem__, reverse=True
    )
    ordered = [tokens[i] for i in order]
    parts = set(ordered)
    return [
        (left, right)
        for token in ordered
        for cut in range(1, len(token))
        if (right := token[cut:]) in parts and (left := token[:cut]) in parts
    ]


def _sentencepiece(table: _Table, merges: list[tuple[str, str]], *, space_prefix: bool) -> Encoder:
    from tokenizers.normalizers import Normalizer, Prepend, Replace, Sequence

    unknown = table.special_id("unknown", 0)
    assert unknown is not None, "token 0 exists"
    encoder = _bpe(table, merges, unk_token=table.tokens[unknown], fuse_unk=True, byte_fallback=True)
    steps: list[Normalizer] = [Prepend(WORD_MARK)] if space_prefix else []
    encoder.normalizer = Sequence([*steps, Replace(" ", WORD_MARK)])
    return encoder


def _bpe(table: _Table, merges: list[tuple[str, str]], **options: Any) -> Encoder:
    from tokenizers import Tokenizer as Encoder
    from tokenizers.models import BPE

    ids = {token: i for i, token in enumerate(table.tokens)}
    try:
        return Encoder(BPE(ids, merges, **options))
    except Exception as error:  # the library raises plain Exception for a rule outside the vocabulary
        raise ModelLoadError(f"do not fit the vocabulary: {error}", field=f"{_PREFIX}merges") from error


def _add_tokens(encoder: Encoder, table: _Table) -> None:
    """Tokens that are cut out of a text before anything else: control and unknown ones, then user-defined ones."""
    from tokenizers import AddedToken

    takes_space: frozenset[str] = frozenset()
    if table.metadata.get("general.architecture") == "phi3" and table.model == "llama":
        # Phi-3's own tokenizer.json has rstrip on these; GGUF has no place for it.
        takes_space = frozenset(table.tokens) - {"<unk>", "<s>", "<|endoftext|>"}
    for special, kinds in ((True, (_UNKNOWN, _CONTROL)), (False, (_USER_DEFINED,))):
        tokens = [
            AddedToken(
                table.tokens[i], normalized=False, special=special, rstrip=table.tokens[i] in takes_space
            )
            for i in table.ids_of(*kinds)
        ]
        (encoder.add_special_tokens if special else encoder.add_tokens)(tokens)


@dataclass(frozen=True, slots=True)
class _Around:
    """The ids that the model's rule puts before and after a text."""

    before: int | None
    after: int | None

    def install(self, encoder: Encoder, table: _Table) -> None:
        from tokenizers.processors import TemplateProcessing

        pieces = [None if i is None else (table.tokens[i], i) for i in (self.before, self.after)]
        named = [piece for piece in pieces if piece is not None]
        if named:
            first, last = ("" if piece is None else piece[0] for piece in pieces)
            single = [part for part in (first, "$A", last) if part]
            encoder.post_processor = TemplateProcessing(single=single, pair=None, special_tokens=named)


def _bert(table: _Table, template: str | None) -> Tokenizer:
    """WordPiece. The file marks the words (``▁the``) where the original vocabulary marks the continuations (``##ing``)."""
    from tokenizers import Tokenizer as Encoder
    from tokenizers.models import WordPiece
    from tokenizers.normalizers import BertNormalizer
    from tokenizers.pre_tokenizers import BertPreTokenizer

    tokens = [_wordpiece(token) for token in table.tokens]
    own = _Table(table.metadata, table.model, tokens, table.kinds)
    unknown, first, last = (
        own.special_id("unknown", 100),
        own.special_id("cls", 101),
        own.special_id("seperator", 102),
    )
    if unknown is None:
        raise ModelLoadError("names no token", field=f"{_PREFIX}unknown_token_id")
    ids = {token: i for i, token in enumerate(tokens)}
    encoder = Encoder(WordPiece(ids, unk_token=tokens[unknown], max_input_chars_per_word=100))
    encoder.normalizer = BertNormalizer(lowercase=True)
    encoder.pre_tokenizer = BertPreTokenizer()
    _add_tokens(encoder, own)
    _Around(first, last).install(encoder, own)
    special = frozenset(own.ids_of(_CONTROL, _UNKNOWN))
    vocabulary = Vocabulary(
        token_bytes=tuple(
            token.encode() if i in special else wordpiece_bytes(token) for i, token in enumerate(tokens)
        ),
        special_ids=special,
        unknown_id=unknown,
        bos_id=first,
        eos_id=last,
        eos_ids=end_ids((), {}, template, len(tokens)),
        drops_first_space=True,
    )
    return Tokenizer(encoder, vocabulary)


def _wordpiece(token: str) -> str:
    if token.startswith("[") and token.endswith("]"):
        return token
    return token[1:] if token.startswith(WORD_MARK) else f"##{token}"
