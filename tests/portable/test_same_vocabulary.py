"""One vocabulary or two: told by what every id stands for."""

from __future__ import annotations

import pytest

from tests.portable.vocabularies import MERGES, byte_level_json
from troth.text.same_vocabulary import vocabulary_difference
from troth.text.tokenizer import Tokenizer
from troth.text.tokenizer_json import tokenizer_from_json


def tokenizer(*added: tuple[str, bool], merges: list[tuple[str, str]] = MERGES) -> Tokenizer:
    tokens = [{"content": content, "special": special} for content, special in added]
    return tokenizer_from_json(byte_level_json(added=tokens, merges=merges))


def test_vocabulary_difference_is_none_where_every_id_means_the_same() -> None:
    assert vocabulary_difference(tokenizer(("<tool>", True)), tokenizer(("<tool>", True))) is None


@pytest.mark.parametrize(
    ("left", "right", "wanted"),
    [
        (tokenizer(("a b", False)), tokenizer(("a c", False)), "is b'a b' in one and b'a c' in the other"),
        (tokenizer(("<x>", True)), tokenizer(("<x>", False)), "is the control token b'<x>' in one and b'<x>' in the"),
        (tokenizer(), tokenizer(("<x>", True)), "is no token in one and the control token b'<x>' in the other"),
        (tokenizer(("<x>", True)), tokenizer(), "is the control token b'<x>' in one and no token in the other"),
        (
            tokenizer(),
            tokenizer(merges=[("h", "e"), ("Ġ", "h"), *MERGES[2:]]),
            "id 256 is b' h' in one and b'he' in the other",
        ),
    ],
    ids=["bytes", "control", "more", "fewer", "order"],
)
def test_vocabulary_difference_names_the_first_id_that_means_something_else(
    left: Tokenizer, right: Tokenizer, wanted: str
) -> None:
    found = vocabulary_difference(left, right)
    assert found is not None
    assert found.startswith("id ")
    assert wanted in found
