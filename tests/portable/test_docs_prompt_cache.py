"""docs/prompt-cache.md lists what the prompt cache tells of itself."""

from __future__ import annotations

import dataclasses
from typing import get_args

from tests.markdown import Document, code, codes
from troth.contracts.prefix_cache import PrefixCacheStatus, PrefixOutcome, RestoreOutcome

DOCUMENT = Document.read("docs/prompt-cache.md")


def test_prompt_cache_document_lists_every_number() -> None:
    rows = DOCUMENT.table("field", "what")
    listed = [name for row in rows for name in codes(row["field"])]
    assert listed == [field.name for field in dataclasses.fields(PrefixCacheStatus)]


def test_prompt_cache_document_lists_every_outcome() -> None:
    rows = DOCUMENT.table("outcome", "the request")
    assert [code(row["outcome"]) for row in rows] == list(get_args(PrefixOutcome))


def test_prompt_cache_document_lists_every_outcome_on_disk() -> None:
    rows = DOCUMENT.table("on disk", "the prompt")
    assert [code(row["on disk"]) for row in rows] == list(get_args(RestoreOutcome))
