"""Whether two models mean the same by their token ids, proved by what the tokenizers hold, whatever they are called.

Refuses to know how text is cut into tokens: a draft model reads ids, never text.
"""

from __future__ import annotations

from troth.text.tokenizer import Tokenizer


def vocabulary_difference(left: Tokenizer, right: Tokenizer) -> str | None:
    """The first id that stands for something else in ``right`` than in ``left``, in words; None: there is none.

    Every id is compared: its bytes, and whether it is a control token. Ids that have no token in one of them (some
    vocabularies are padded) must have none in the other.
    """
    for token_id in range(max(left.vocab_size, right.vocab_size)):
        one, other = _meaning(left, token_id), _meaning(right, token_id)
        if one != other:
            return f"id {token_id} is {_shown(*one)} in one and {_shown(*other)} in the other"
    return None


def _meaning(tokenizer: Tokenizer, token_id: int) -> tuple[bytes, bool]:
    if token_id >= tokenizer.vocab_size:
        return b"", False
    return tokenizer.token_bytes(token_id), tokenizer.is_special(token_id)


def _shown(data: bytes, special: bool) -> str:
    if not data and not special:
        return "no token"
    return f"{'the control token ' if special else ''}{data!r}"
