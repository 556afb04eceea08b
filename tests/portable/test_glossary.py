"""CONTEXT.md binds the code: one word per concept, and the words to avoid are avoided."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "src" / "troth"

# Words of the "not" column that are also a library's or a protocol's own, where no other word will do.
ALLOWED = {
    ("serve", "page"): "an HTML page",
    ("runtime", "task"): "asyncio's",
    ("serve", "task"): "asyncio's",
    ("testing", "task"): "asyncio's",
    ("artifact", "checkpoint"): "Hugging Face's word for files, in prose only",
}


def table() -> list[tuple[list[str], list[str]]]:
    rows = []
    for line in (ROOT / "CONTEXT.md").read_text().splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if line.startswith("|") and len(cells) == 3 and cells[0] not in ("word", "---"):
            rows.append((re.split(r", ", cells[0]), [w for w in re.split(r", ", cells[2]) if w]))
    return rows


def words_of(name: str) -> list[str]:
    spaced = re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", name)
    return [word.lower() for word in spaced.split("_") if word]


def public_names(tree: ast.Module) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            yield node.name
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield from (a.arg for a in [*node.args.args, *node.args.kwonlyargs])
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            yield node.target.id


def modules() -> list[Path]:
    return sorted(path for path in PACKAGE.rglob("*.py"))


def test_glossary_lists_words_and_what_they_replace() -> None:
    rows = table()
    assert len(rows) > 30
    assert any("page" in avoided for _, avoided in rows)
    listed = [word for words, _ in rows for word in words]
    assert len(listed) == len(set(listed)), "a word is explained twice"


@pytest.mark.parametrize("path", modules(), ids=lambda p: str(p.relative_to(PACKAGE)))
def test_glossary_words_to_avoid_are_in_no_public_name(path: Path) -> None:
    avoided = {word for _, words in table() for word in words if " " not in word}
    package = path.relative_to(PACKAGE).parts[0]
    found = {
        name: word
        for name in public_names(ast.parse(path.read_text()))
        if not name.startswith("_")
        for word in words_of(name)
        if word in avoided and (package, word) not in ALLOWED
    }
    assert not found, f"names that CONTEXT.md has another word for: {found}"


def test_glossary_explains_every_noun_of_the_contracts() -> None:
    """A class of ring 0 whose name holds no word of CONTEXT.md is a new concept."""
    known = set(re.findall(r"[a-z]+", (ROOT / "CONTEXT.md").read_text().lower()))
    classes = {
        node.name
        for path in (PACKAGE / "contracts").glob("*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.ClassDef)
    }
    unexplained = {name for name in classes if not any({word, singular(word)} & known for word in words_of(name))}
    assert not unexplained, f"say in CONTEXT.md what these are: {sorted(unexplained)}"


def singular(word: str) -> str:
    return word.removesuffix("s") if len(word) > 3 else word
