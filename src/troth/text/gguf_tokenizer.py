"""Owns the tokenizers that GGUF metadata describes: byte-level BPE, scored SentencePiece, Gemma 4's BPE, WordPiece.

Knows no file: ``artifact/gguf.py`` reads it, and gives a plain mapping. Read next: ``gguf_vocabulary.py``,
``pretokenizers.py``, ``tokenizer.py``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Final

from troth.text.gguf_vocabulary import GgufVocabulary, TokenKind
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


MAX_SPLIT_CHARACTERS: Final = 2**28
"""Characters in all splits of all tokens; Gemma 3's 262,144 tokens come to 11 million."""


def tokenizer_from_gguf(metadata: Mapping[str, Any], path: str = "", *, template: str | None = None) -> Tokenizer:
    """The tokenizer that GGUF metadata describes.

    Args:
        metadata: Key -> value of the file, arrays as lists.
        path: The file, for errors.
        template: Source of the chat template, which decides which end-of-turn tokens end an answer; None: the one in
            the metadata.

    Raises:
        ModelLoadError: a tokenizer model or ``pre`` this package does not know, or damaged arrays.
    """
    own = GgufVocabulary.read(metadata, path)
    if template is None:
        found = metadata.get("tokenizer.chat_template")
        template = found if isinstance(found, str) else None
    match own.model:
        case "gpt2":
            return _byte_level(own, template)
        case "llama":
            return _scored(own, template)
        case "gemma4":
            encoder = _sentencepiece(own, own.merges(), space_prefix=False)
            return _finish(own, encoder, sentencepiece_bytes, template, add_bos=True)
        case "bert":
            return _bert(own)
    raise own.error(f"{own.model!r} is not supported; gpt2, llama, gemma4 and bert are", "model")


def merges_from_scores(tokens: list[str], kinds: list[int], scores: list[float]) -> list[tuple[str, str]]:
    """Merge rules by which pair-driven BPE gives exactly what SentencePiece's score-driven merging gives.

    SentencePiece joins, again and again, the two neighbours whose joined text is the token of the highest score, the
    leftmost of equals. So: every split of every normal token into two of them is a rule, best score first. Rules of
    one token never compete. What happens inside a stretch of text that ends up as token T does not depend on its
    surroundings (nothing else touched it, and order inside is order overall), so T is always made from one and the
    same pair; were another of its splits adjacent too, it would have to be that pair as well. Different tokens of
    equal score keep the order of their ids, where SentencePiece would take the leftmost; trained vocabularies only
    have such ties between runs of spaces.

    Raises:
        ValueError: tokens so long that their splits alone would take minutes and gigabytes.
    """
    normal = [token_id for token_id, kind in enumerate(kinds) if kind == TokenKind.NORMAL]
    num_characters = sum(len(tokens[token_id]) ** 2 for token_id in normal)
    if num_characters > MAX_SPLIT_CHARACTERS:
        raise ValueError(f"splitting its tokens takes {num_characters} characters; {MAX_SPLIT_CHARACTERS} are allowed")
    ordered = [tokens[token_id] for token_id in sorted(normal, key=scores.__getitem__, reverse=True)]
    parts = set(ordered)
    return [
        (left, right)
        for token in ordered
        for cut in range(1, len(token))
        if (right := token[cut:]) in parts and (left := token[:cut]) in parts
    ]


def _byte_level(own: GgufVocabulary, template: str | None) -> Tokenizer:
    from tokenizers import Regex
    from tokenizers.pre_tokenizers import ByteLevel, Sequence, Split

    name = own.get("pre")
    rule = PRETOKENIZERS.get(str(name))
    if rule is None:
        raise own.error(f"{name!r} is not known; known are {', '.join(PRETOKENIZERS)}", "pre")
    encoder = _bpe(own, own.merges(), ignore_merges=rule.ignore_merges)
    splits = [Split(Regex(pattern), "isolated") for pattern in rule.patterns]
    encoder.pre_tokenizer = Sequence([*splits, ByteLevel(add_prefix_space=False, use_regex=False)])
    return _finish(own, encoder, byte_level_bytes, template, add_bos=rule.add_bos)


def _scored(own: GgufVocabulary, template: str | None) -> Tokenizer:
    if own.flag("remove_extra_whitespaces", False):
        raise own.error("true is not supported", "remove_extra_whitespaces")
    space_prefix = own.flag("add_space_prefix", True)
    try:
        merges = merges_from_scores(own.tokens, own.kinds, own.scores())
    except ValueError as error:
        raise own.error(str(error), "tokens") from None
    encoder = _sentencepiece(own, merges, space_prefix=space_prefix)
    # The ids that a file of this model means when it names none.
    named = {"bos_token_id": 1, "eos_token_id": 2, "unknown_token_id": 0}
    defaults = {f"tokenizer.ggml.{key}": token_id for key, token_id in named.items()}
    own = replace(own, metadata={**defaults, **own.metadata})
    return _finish(own, encoder, sentencepiece_bytes, template, add_bos=True, drops_first_space=space_prefix)


def _sentencepiece(own: GgufVocabulary, merges: list[tuple[str, str]], *, space_prefix: bool) -> Encoder:
    from tokenizers.normalizers import Normalizer, Prepend, Replace, Sequence

    unknown = own.tokens[own.id_of("unknown", 0) or 0]
    encoder = _bpe(own, merges, unk_token=unknown, fuse_unk=True, byte_fallback=True)
    steps: list[Normalizer] = [Prepend(WORD_MARK)] if space_prefix else []
    encoder.normalizer = Sequence([*steps, Replace(" ", WORD_MARK)])
    return encoder


def _bpe(own: GgufVocabulary, merges: list[tuple[str, str]], **options: Any) -> Encoder:
    from tokenizers import Tokenizer as Encoder
    from tokenizers.models import BPE

    ids = {token: token_id for token_id, token in enumerate(own.tokens)}
    try:
        return Encoder(BPE(ids, merges, **options))
    except Exception as error:  # the library raises plain Exception for a rule outside the vocabulary
        raise own.error(f"does not fit the vocabulary: {error}", "merges") from error


def _bert(own: GgufVocabulary) -> Tokenizer:
    """WordPiece. The file marks words (``▁the``) where the published vocabulary marks continuations (``##ing``)."""
    from tokenizers import Tokenizer as Encoder
    from tokenizers.models import WordPiece
    from tokenizers.normalizers import BertNormalizer
    from tokenizers.pre_tokenizers import BertPreTokenizer

    own = replace(own, tokens=[_as_published(token) for token in own.tokens])
    unknown, first, last = own.id_of("unknown", 100), own.id_of("cls", 101), own.id_of("seperator", 102)
    if unknown is None:
        raise own.error("names no token of this vocabulary", "unknown_token_id")
    ids = {token: token_id for token_id, token in enumerate(own.tokens)}
    encoder = Encoder(WordPiece(ids, unk_token=own.tokens[unknown], max_input_chars_per_word=100))
    encoder.normalizer = BertNormalizer(lowercase=True)
    encoder.pre_tokenizer = BertPreTokenizer()
    _add_tokens(encoder, own)
    _add_ends(encoder, own, first, last)
    special = frozenset(own.ids_of(TokenKind.CONTROL, TokenKind.UNKNOWN))
    return Tokenizer(
        encoder,
        Vocabulary(
            num_ids=len(own.tokens),
            text_of=own.tokens.__getitem__,
            to_bytes=wordpiece_bytes,
            special_ids=special,
            unknown_id=unknown,
            bos_id=first,
            eos_id=last,
            drops_first_space=True,
        ),
    )


def _as_published(token: str) -> str:
    if token.startswith("[") and token.endswith("]"):
        return token
    return token[1:] if token.startswith(WORD_MARK) else f"##{token}"


def _finish(
    own: GgufVocabulary,
    encoder: Encoder,
    to_bytes: Callable[[str], bytes],
    template: str | None,
    *,
    add_bos: bool,
    drops_first_space: bool = False,
) -> Tokenizer:
    """What the BPE models have in common: added tokens, BOS and EOS, and the bytes of each token."""
    bos, eos = own.id_of("bos", None), own.id_of("eos", None)
    _add_tokens(encoder, own)
    add_bos, add_eos = own.flag("add_bos_token", add_bos), own.flag("add_eos_token", False)
    _add_ends(encoder, own, bos if add_bos else None, eos if add_eos else None)
    control = {own.tokens[token_id]: token_id for token_id in own.ids_of(TokenKind.CONTROL)}
    declared = [i for i in (eos, own.id_of("eot", None), own.id_of("eom", None)) if i is not None]
    special = frozenset(own.ids_of(TokenKind.CONTROL, TokenKind.UNKNOWN))
    return Tokenizer(
        encoder,
        Vocabulary(
            num_ids=len(own.tokens),
            text_of=own.tokens.__getitem__,
            to_bytes=to_bytes,
            special_ids=special,
            unknown_id=own.id_of("unknown", None),
            bos_id=bos,
            eos_id=eos,
            eos_ids=end_ids(declared, control, template, len(own.tokens)),
            drops_first_space=drops_first_space,
        ),
    )


def _add_tokens(encoder: Encoder, own: GgufVocabulary) -> None:
    """Tokens that are cut out of a text before anything else: control and unknown ones, and user-defined ones."""
    from tokenizers import AddedToken

    takes_space: set[str] = set()
    if own.model == "llama" and own.metadata.get("general.architecture") == "phi3":
        # Phi-3's own tokenizer.json lets these swallow the white space after them; GGUF has no place for that.
        takes_space = {*own.tokens} - {"<unk>", "<s>", "<|endoftext|>"}
    special = {TokenKind.CONTROL, TokenKind.UNKNOWN}
    for kinds, add in (
        (special, encoder.add_special_tokens),
        ({TokenKind.USER_DEFINED}, encoder.add_tokens),
    ):
        tokens = (own.tokens[token_id] for token_id in own.ids_of(*kinds))
        add([AddedToken(t, normalized=False, special=kinds is special, rstrip=t in takes_space) for t in tokens])


def _add_ends(encoder: Encoder, own: GgufVocabulary, before: int | None, after: int | None) -> None:
    """Put these ids around every text that is encoded with special tokens."""
    from tokenizers.processors import TemplateProcessing

    named = [(own.tokens[token_id], token_id) for token_id in (before, after) if token_id is not None]
    if named:
        first = "" if before is None else own.tokens[before]
        last = "" if after is None else own.tokens[after]
        single = [part for part in (first, "$A", last) if part]
        encoder.post_processor = TemplateProcessing(single=single, pair=None, special_tokens=named)
