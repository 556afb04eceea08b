"""Owns text -> ids and ids -> text for one model.

Knows no chat template, no request and no file format; the merge work is the ``tokenizers`` library's.
Read next: ``tokenizer_json.py`` and ``gguf_tokenizer.py`` (build it), ``detokenize.py`` (the same decoding, streamed).
"""

from __future__ import annotations

import threading
import unicodedata
from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from troth.errors import RequestError
from troth.text.control_text import MARKS, without_marks
from troth.text.vocabulary import WORD_MARK, Vocabulary

if TYPE_CHECKING:
    from tokenizers import AddedToken, Encoding
    from tokenizers import Tokenizer as Encoder

# Every byte that valid UTF-8 can hold, runs and edges of white space, both cases, a decomposed accent.
_PROBE: Final = (
    "  "
    + "".join(map(chr, range(0xC0)))
    + "".join(map(chr, range(0xC5, 0x800, 0x40)))
    + "".join(map(chr, (0x905, *range(0x1000, 0xD000, 0x1000), 0xD55C, 0xE000, 0xFFFD)))
    + "".join(map(chr, (0x10400, 0x40000, 0x80000, 0xC0000, 0x100000)))
    + "e\u0301 a  b   c\n\n\t\t A \n "
)
# Stands before a text that continues another; an added token of the encoder without control tokens, and of no model.
_FENCE: Final = "\ue0c9\ue0ab\ue0c9"
# Canonical composition shrinks text at most threefold (Hangul: three jamo of three bytes become one syllable).
_NFC_SHRINK: Final = 3


def require_unicode(text: str, param: str) -> None:
    """Raise RequestError naming ``param`` when ``text`` holds half a surrogate pair."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise RequestError(
            f"{param} is not valid Unicode text: character {error.start} is half of a surrogate pair "
            f"(U+{ord(text[error.start]):04X}); send the pair or U+FFFD",
            param=param,
        ) from None


class Tokenizer:
    """Text to ids and back. Safe to use from several threads at once.

    Decoding is by bytes: the bytes of all ids are joined and read as UTF-8, and what is not UTF-8 becomes U+FFFD. So
    a streamed decode equals the whole one whatever the ids (``detokenize.py``), and an id of the model that has no
    token decodes to nothing.
    """

    def __init__(self, encoder: Encoder, vocabulary: Vocabulary) -> None:
        encoder.no_truncation()  # a file may ask for it; a prompt is never cut silently
        encoder.no_padding()
        self._encoder = encoder
        self._vocabulary = vocabulary
        self._plain: Encoder | None = None
        self._plain_lock = threading.Lock()
        added: dict[int, AddedToken] = dict(encoder.get_added_tokens_decoder())
        self._takes_space = any(token.lstrip or token.rstrip for token in added.values())
        self._cut_ids = _cut_ids(added)
        self._control_ids = vocabulary.special_ids - {vocabulary.unknown_id}
        self._bytes: dict[int, bytes] = {}
        self.vocab_size: Final = vocabulary.num_ids
        """Ids below this may have a token."""
        self.bos_id: Final = vocabulary.bos_id
        self.eos_ids: Final = vocabulary.eos_ids
        self.bos_token: Final = self._named(vocabulary.bos_id)
        self.eos_token: Final = self._named(vocabulary.eos_id)
        self.drops_first_space: Final = vocabulary.drops_first_space
        self.add_bos: Final = self.bos_id is not None and encoder.encode("").ids[:1] == [self.bos_id]
        """Whether the model's own rule puts ``bos_id`` before a text."""

    @classmethod
    def from_folder(cls, folder: Path, *, template: str | None = None) -> Tokenizer:
        """The tokenizer of a model folder; see ``tokenizer_json.load_tokenizer``. Raises ModelLoadError."""
        from troth.text.tokenizer_json import load_tokenizer

        return load_tokenizer(folder, template=template)

    @classmethod
    def from_gguf(cls, metadata: Mapping[str, Any], path: str = "", *, template: str | None = None) -> Tokenizer:
        """The tokenizer GGUF metadata describes; see ``gguf_tokenizer.tokenizer_from_gguf``. Raises ModelLoadError."""
        from troth.text.gguf_tokenizer import tokenizer_from_gguf

        return tokenizer_from_gguf(metadata, path, template=template)

    def encode(
        self, text: str, *, add_special: bool = True, parse_special: bool = True, param: str = "prompt"
    ) -> list[int]:
        """The ids of ``text``.

        Args:
            text: Any Unicode text; NUL is a character like others.
            add_special: Put the tokens around it that the model's own rule asks for (BOS, for some EOS).
            parse_special: Read the text of a control token as that token. False: it is spelled in ordinary tokens.
                Tokens that are added but not control tokens (``<think>`` of some families) are read either way.
            param: Name of the request field, for errors.

        Raises:
            RequestError: half a surrogate pair, or a control token that this vocabulary spells as itself.
        """
        require_unicode(text, param)
        if parse_special:
            return list(_encoded(self._encoder, text, add_special, param).ids)
        encoding = _encoded(self._plain_encoder(), text, add_special, param)
        ids = list(encoding.ids)
        for token_id, around in zip(ids, encoding.special_tokens_mask, strict=True):
            if token_id in self._control_ids and not around:
                raise RequestError(
                    f"{param} spells the control token {self._named(token_id)!r} out of ordinary text, "
                    "and this model's vocabulary cannot write it otherwise; change that text",
                    param=param,
                )
        return ids

    def encode_split(self, text: str, cut: int, *, param: str = "prompt") -> tuple[list[int], int | None]:
        """The ids of ``text`` without added specials, and how many of them are exactly those of ``text[:cut]``.

        The number is None when an added token does not begin at character ``cut``: then only encoding ``text[:cut]``
        by itself can tell. Where one does, it can be read off, because text is cut at added tokens before anything
        else happens to it, and a cut at the end of the left part cannot change which of them match before it.
        """
        ids, (index,) = self._encode_cut(text, (cut,), param)
        return ids, index

    def encode_guarded(
        self, text: str, cuts: Sequence[int], *, param: str = "messages"
    ) -> tuple[list[int], list[int | None]]:
        """As ``encode_split``, at several cuts of a text with marks (``control_text.py``): no control token is read
        where one is.

        The text between two control tokens is encoded without regard to what it spells when there is a mark in it.

        Raises:
            RequestError: half a surrogate pair, or a control token that this vocabulary spells as itself.
        """
        if MARKS.search(text) is None:
            return self._encode_cut(text, cuts, param)
        require_unicode(text, param)
        encoding = _encoded(self._encoder, text, False, param)
        ids: list[int] = []
        gap: list[int] = []
        indexes: dict[int, int | None] = dict.fromkeys(cuts)
        start = 0
        for token_id, (first, last) in zip(encoding.ids, encoding.offsets, strict=True):
            if token_id not in self._control_ids:
                gap.append(token_id)
                continue
            ids += self._unguarded(text[start:first], gap, at_start=start == 0, param=param)
            if first in indexes and token_id in self._cut_ids:
                indexes[first] = len(ids)
            ids.append(token_id)
            gap, start = [], last
        ids += self._unguarded(text[start:], gap, at_start=start == 0, param=param)
        return ids, [indexes[cut] for cut in cuts]

    @cached_property
    def cut_texts(self) -> dict[int, str]:
        """Control tokens at which a text can be cut, and how they are spelled: what stands from one on is encoded as if
        it stood alone.
        """
        named = {token_id: self._named(token_id) for token_id in self._cut_ids & self._control_ids}
        return {token_id: text for token_id, text in named.items() if text}

    @cached_property
    def longest_added(self) -> int:
        """Characters of the longest token that is matched in a text before anything else happens to it."""
        return max((len(token.content) for token in self._encoder.get_added_tokens_decoder().values()), default=0)

    def _encode_cut(self, text: str, cuts: Sequence[int], param: str) -> tuple[list[int], list[int | None]]:
        require_unicode(text, param)
        encoding = _encoded(self._encoder, text, False, param)
        ids = list(encoding.ids)
        indexes: list[int | None] = []
        for cut in cuts:
            index = encoding.char_to_token(cut)
            span = None if index is None else encoding.token_to_chars(index)
            exact = index is not None and ids[index] in self._cut_ids and span is not None and span[0] == cut
            indexes.append(index if exact else None)
        return ids, indexes

    def _unguarded(self, text: str, ids: list[int], *, at_start: bool, param: str) -> list[int]:
        """The ids of what stands between two control tokens; ``ids`` themselves when nothing there is marked."""
        spelled = without_marks(text)
        if spelled == text:
            return ids
        if at_start or _FENCE in spelled:
            return self.encode(spelled, add_special=False, parse_special=False, param=param)
        # Behind a token, so that no space is put before the text as at the start of a prompt.
        return self.encode(_FENCE + spelled, add_special=False, parse_special=False, param=param)[1:]

    @cached_property
    def control_texts(self) -> frozenset[str]:
        """How this vocabulary spells its control tokens."""
        texts = (self._vocabulary.bytes_of(token_id).decode("utf-8", "replace") for token_id in self._control_ids)
        return frozenset(texts) - {""}

    def decode(self, ids: Iterable[int], *, skip_special: bool = True, at_start: bool = True) -> str:
        """The text of ``ids``.

        Args:
            ids: Token ids; those without a token stand for nothing.
            skip_special: Leave control tokens out.
            at_start: The text begins here. False: it continues a text, so a space before its first word is kept.
        """
        data = b"".join(self.shown_bytes(token_id, skip_special) for token_id in ids)
        text = data.decode("utf-8", "replace")
        return text[1:] if at_start and self.drops_first_space and text.startswith(" ") else text

    def token_bytes(self, token_id: int) -> bytes:
        """The raw bytes ``token_id`` stands for; a control token its own text; none for an id without a token."""
        known = self._bytes.get(token_id)
        if known is None:
            known = self._bytes[token_id] = self._vocabulary.bytes_of(token_id)
        return known

    def shown_bytes(self, token_id: int, skip_special: bool) -> bytes:
        """The bytes a reader sees of ``token_id``: none of a control token that is skipped."""
        return b"" if skip_special and self.is_special(token_id) else self.token_bytes(token_id)

    def is_special(self, token_id: int) -> bool:
        """Whether ``token_id`` is a control token."""
        return token_id in self._vocabulary.special_ids

    def min_num_tokens(self, text: str, *, param: str = "prompt") -> int:
        """A lower bound on ``len(encode(text))`` that costs one pass over the bytes. 0 where none is known.

        Raises:
            RequestError: half a surrogate pair.
        """
        require_unicode(text, param)
        if self._shrink == 0:
            return 0
        counted = text.replace(WORD_MARK, " ")  # three bytes of text, but a space once inside a token
        if self._takes_space:
            counted = "".join(counted.split())
        return -(-len(self._kept(counted)) // (self.max_token_bytes * self._shrink))

    @cached_property
    def max_token_bytes(self) -> int:
        """Bytes of the longest token."""
        return max(map(len, map(self._vocabulary.bytes_of, range(self.vocab_size))))

    @cached_property
    def _lost_bytes(self) -> bytes:
        """Bytes that no token stands for; some vocabularies lack rare control characters."""
        held = {data for data in map(self._vocabulary.bytes_of, range(self.vocab_size)) if len(data) == 1}
        return bytes(byte for byte in range(256) if bytes([byte]) not in held)

    @cached_property
    def _shrink(self) -> int:
        """Most bytes of a text that one byte of its tokens can stand for; 0 when text may vanish. Found by trying."""
        back = b"".join(map(self.token_bytes, self.encode(_PROBE, add_special=False)))
        back = back[1:] if self.drops_first_space else back
        if back == self._kept(_PROBE):
            return 1
        return _NFC_SHRINK if back == self._kept(unicodedata.normalize("NFC", _PROBE)) else 0

    def _kept(self, text: str) -> bytes:
        return text.encode().translate(None, self._lost_bytes)

    def _named(self, token_id: int | None) -> str | None:
        return None if token_id is None else self.token_bytes(token_id).decode("utf-8", "replace")

    def _plain_encoder(self) -> Encoder:
        """The encoder that does not see control tokens. It shares the merges, so it costs next to nothing."""
        with self._plain_lock:
            if self._plain is None:
                self._plain = _without_control_tokens(self._encoder)
            return self._plain


def _encoded(encoder: Encoder, text: str, add_special: bool, param: str) -> Encoding:
    """``encoder.encode``. Raises RequestError where the library gives up on a text: a pattern of the model's own may
    backtrack without end. It panics then, with an exception that derives from BaseException alone.
    """
    try:
        return encoder.encode(text, add_special_tokens=add_special)
    except BaseException as error:
        if type(error).__name__ != "PanicException":
            raise
        raise RequestError(f"this model's tokenizer cannot read {param}: {error}", param=param) from None


def _cut_ids(added: Mapping[int, AddedToken]) -> frozenset[int]:
    """The added tokens at which a text can be cut without looking at what stands before them."""
    if any(token.single_word for token in added.values()):
        return frozenset()  # whether such a token matches depends on the character after it
    return frozenset(i for i, token in added.items() if not (token.normalized or token.lstrip))


def _without_control_tokens(encoder: Encoder) -> Encoder:
    from tokenizers import AddedToken
    from tokenizers import Tokenizer as Encoder

    plain = Encoder(encoder.model)
    for part in ("normalizer", "pre_tokenizer", "post_processor", "decoder"):
        if (value := getattr(encoder, part)) is not None:
            setattr(plain, part, value)
    # All of them, in order of their ids: an added token outside the model's own vocabulary gets the next free id.
    tokens = sorted(encoder.get_added_tokens_decoder().items())
    for special, run in groupby((token for _, token in tokens), key=lambda token: token.special):
        (plain.add_special_tokens if special else plain.add_tokens)(list(run))
    plain.add_tokens([AddedToken(_FENCE, normalized=False, special=False)])
    plain.encode_special_tokens = True
    return plain
