"""Token ids of the beginnings of rendered chats, kept, so that a turn encodes only what is new in it.

Refuses to know messages and templates. Exact: the ids are those of the whole text, whatever was kept.

    text     <|im_start|>system ... <|im_end|>\\n<|im_start|>user ... <|im_end|>\\n<|im_start|>assistant\\n
    places   ^                     ^           ^                    ^           ^

A text is cut at control tokens before anything else happens to it, so from a place on it is encoded as if it stood
alone. Which tokens are matched up to a place depends on nothing behind the longest one that could begin there; so ids
are kept by a hash of the text up to there. Read next: ``tokenizer.py``, ``object_cache.py``.
"""

from __future__ import annotations

import re
from array import array
from hashlib import blake2b
from typing import Final

from troth.contracts.object_cache import ObjectCache
from troth.text.tokenizer import Tokenizer, require_unicode

BEGINNING_BYTES: Final = 16 << 20
"""Of token ids that are kept: some four million, of which a long conversation has a few ten thousand."""
KEPT_PLACES: Final = 6
"""Of one text, its last ones: two or three turns. Who goes further back than that encodes all of it once more."""
MIN_CHARACTERS: Final = 256
"""Shorter beginnings are encoded faster than they are looked up."""
_DIGEST_BYTES: Final = 16
_OBJECT_BYTES: Final = 256
"""Of key and bookkeeping, beside four for each id."""


class TokenBeginnings:
    """Encodes for one tokenizer. Safe to use from several threads.

    Args:
        tokenizer: whose ids they are; the keys do not say, so ``objects`` must not serve another.
        objects: where they are kept.
    """

    def __init__(self, tokenizer: Tokenizer, objects: ObjectCache) -> None:
        self._tokenizer = tokenizer
        self._objects = objects
        self._margin = tokenizer.longest_added
        self._met: frozenset[int] = frozenset()
        """Control tokens that texts had so far: some vocabularies have thousands, which no template writes."""
        self._pattern: re.Pattern[str] | None = None

    def encode(self, text: str, cut: int) -> tuple[list[int], int | None]:
        """The ids of a text with marks (``control_text.py``), and how many are those of ``text[:cut]``, if clear.

        As ``Tokenizer.encode_guarded``, but the number may be None where a beginning was known and ``cut`` is in it.

        Raises:
            RequestError: as there.
        """
        require_unicode(text, "messages")
        places = self._places_in(text)
        keys = self._keys(text, places)
        number, ids = len(places) - 1, list[int]()
        while number >= 0:
            lease = self._objects.take(keys[number])
            if lease is not None:
                with lease:
                    ids = lease.value.tolist()
                break
            number -= 1
        encoded = self._go_on(text, cut, places, keys, number, ids)
        if number < 0 and self._meets_new(encoded[0]):
            return self.encode(text, cut)  # once more, to keep its beginnings too
        return encoded

    def _go_on(
        self, text: str, cut: int, places: list[int], keys: list[bytes], number: int, ids: list[int]
    ) -> tuple[list[int], int | None]:
        """Encode what follows a known place, and keep the beginnings up to later ones."""
        start, num_known = (places[number] if number >= 0 else 0), len(ids)
        cuts = [place - start for place in places[number + 1 :]]
        if cut >= start:
            cuts.append(cut - start)
        behind, indexes = self._tokenizer.encode_guarded(text[start:], cuts)
        ids += behind
        boundary = indexes.pop() if cut >= start else None
        for key, index in zip(keys[number + 1 :], indexes, strict=True):
            if index is not None:
                kept = array("i", ids[: num_known + index])
                self._objects.put(key, kept, _OBJECT_BYTES + 4 * len(kept)).release()
        return ids, None if boundary is None else num_known + boundary

    def _meets_new(self, ids: list[int]) -> bool:
        """Take note of the control tokens of a text; whether there are new ones."""
        texts = self._tokenizer.cut_texts
        met = self._met | (texts.keys() & set(ids))
        if met == self._met:
            return False
        self._pattern = re.compile("|".join(re.escape(texts[token_id]) for token_id in sorted(met)))
        self._met = met
        return True

    def _places_in(self, text: str) -> list[int]:
        """Where its last control tokens may be, as far as they and what could be matched there lie inside of it."""
        pattern = self._pattern
        if pattern is None:
            return []
        last = len(text) - self._margin
        found = [match.start() for match in pattern.finditer(text)]
        return [place for place in found if MIN_CHARACTERS <= place <= last][-KEPT_PLACES:]

    def _keys(self, text: str, places: list[int]) -> list[bytes]:
        """Of each place, a hash of all on which the ids before it depend."""
        hashed, at, keys = blake2b(digest_size=_DIGEST_BYTES), 0, []
        for place in places:
            hashed.update(text[at : place + self._margin].encode())
            at = place + self._margin
            keys.append(hashed.digest())
        return keys
