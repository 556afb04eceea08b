"""JSON files that a user names: what is wrong with one is said in words, with the file and the place."""

from __future__ import annotations

from pathlib import Path

import pytest

from troth.cli.json_operand import read_json
from troth.errors import OptionError


def test_json_operand_is_its_value(tmp_path: Path) -> None:
    (tmp_path / "file").write_text('[{"prompt": "\u00e9"}]', encoding="utf-8")
    assert read_json(tmp_path / "file") == [{"prompt": "\u00e9"}]


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b'{"a": 1,\n  b}', "is not JSON: Expecting property name enclosed in double quotes at line 2, column 3"),
        (b"", "is not JSON: Expecting value at line 1, column 1"),
        (b'"\xff\xfe\xfd"', "is not JSON: byte 1 is not part of a UTF-8 text"),
        (b"[" * 100_000, "is not JSON that can be read: maximum recursion depth"),
    ],
)
def test_json_operand_that_is_none_is_refused_with_the_place(tmp_path: Path, content: bytes, said: str) -> None:
    (tmp_path / "file").write_bytes(content)
    with pytest.raises(OptionError) as caught:
        read_json(tmp_path / "file")
    assert str(caught.value).startswith(f"{tmp_path / 'file'}: {said}")


def test_json_operand_that_cannot_be_read_is_refused_with_the_reason(tmp_path: Path) -> None:
    with pytest.raises(OptionError, match="no: there is no such file"):
        read_json(tmp_path / "no")
    with pytest.raises(OptionError, match="cannot be read: Is a directory"):
        read_json(tmp_path)
