"""Reads the documents: sections, tables and fenced blocks, so that tests can hold what they say against the code.

Knows the few forms that ``docs/`` uses and nothing else of Markdown. No torch.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Self

ROOT = Path(__file__).parents[1]
_HEADING = re.compile(r"^(#{1,6}) (.+)$")
_FENCE = re.compile(r"^```(\w*)$")
_CODE = re.compile(r"`([^`]+)`")
_CELL_END = re.compile(r"(?<!\\)\|")

Row = dict[str, str]
"""Column heading -> cell."""


@dataclass(frozen=True)
class Fence:
    """A fenced block."""

    language: str
    text: str
    line: int
    """Number of its first line in the document, from 1."""


@dataclass(frozen=True)
class Document:
    """A document, or one section of it with everything below its heading."""

    path: Path
    lines: tuple[tuple[int, str], ...]
    """(line number, line)."""

    @classmethod
    def read(cls, name: str) -> Self:
        """A document by its path from the root of the repository."""
        return cls(ROOT / name, tuple(enumerate((ROOT / name).read_text().splitlines(), 1)))

    @property
    def text(self) -> str:
        """All of it."""
        return "\n".join(line for _, line in self.lines)

    @property
    def flat(self) -> str:
        """All of it in one line, for looking up sentences."""
        return " ".join(self.text.split())

    def section(self, title: str) -> Document:
        """The section under a heading; fails when there is none, or more than one."""
        found = [i for i, (depth, name) in self._headings().items() if name == title]
        assert len(found) == 1, f"{self.path.name} has {len(found)} headings {title!r}"
        start = found[0]
        depth = self._headings()[start][0]
        ends = [i for i, (other, _) in self._headings().items() if i > start and other <= depth]
        return Document(self.path, self.lines[start + 1 : ends[0] if ends else None])

    def headings(self, depth: int) -> list[str]:
        """The headings of one depth, in order."""
        return [name for level, name in self._headings().values() if level == depth]

    def table(self, *columns: str) -> list[Row]:
        """The rows of the one table that has these columns, in this order; fails when there is not exactly one."""
        found = [rows for heads, rows in self._tables() if heads == list(columns)]
        assert len(found) == 1, f"{self.path.name} has {len(found)} tables of {columns} here"
        return found[0]

    def fences(self, *languages: str) -> list[Fence]:
        """The fenced blocks in one of these languages; of all where none is given."""
        fences: list[Fence] = []
        block: list[str] | None = None
        for number, line in self.lines:
            if block is None:
                if match := _FENCE.match(line):
                    language, block, first = match[1], [], number + 1
            elif line == "```":
                fences.append(Fence(language, "".join(f"{one}\n" for one in block), first))
                block = None
            else:
                block.append(line)
        assert block is None, f"{self.path.name}: a fenced block does not end"
        return [fence for fence in fences if not languages or fence.language in languages]

    def output_of(self, fence: Fence) -> str | None:
        """What the document says a block prints: the text block that follows it, None when there is none."""
        end = fence.line + fence.text.count("\n")
        rest = [line for number, line in self.lines if number > end]
        following = next((line for line in rest if line), "")
        if following != "```text":
            return None
        return next(other.text for other in self.fences("text") if other.line > end)

    def _headings(self) -> dict[int, tuple[int, str]]:
        """Index of the line -> (depth, title); fenced blocks may hold lines that look the same."""
        headings: dict[int, tuple[int, str]] = {}
        fenced = False
        for index, (_, line) in enumerate(self.lines):
            if line.startswith("```"):
                fenced = not fenced
            elif not fenced and (match := _HEADING.match(line)):
                headings[index] = (len(match[1]), match[2].replace("`", ""))
        return headings

    def _tables(self) -> list[tuple[list[str], list[Row]]]:
        tables: list[tuple[list[str], list[Row]]] = []
        above = ""
        for _, line in self.lines:
            if line.startswith("|") and not above.startswith("|"):
                tables.append((_cells(line), []))
            elif line.startswith("|") and not line.startswith("|---"):
                heads, rows = tables[-1]
                cells = _cells(line)
                assert len(cells) == len(heads), f"{self.path.name}: {line!r} has {len(cells)} cells, not {len(heads)}"
                rows.append(dict(zip(heads, cells, strict=True)))
            above = line
        return tables


def codes(cell: str) -> list[str]:
    """Everything in a cell that is written as code."""
    return _CODE.findall(cell)


def code(cell: str) -> str:
    """The one thing in a cell that is written as code."""
    found = codes(cell)
    assert len(found) == 1, f"{cell!r} holds {len(found)} pieces of code, not one"
    return found[0]


def documents() -> list[str]:
    """The documents for readers, by their path from the root of the repository."""
    paths = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
    return [str(path.relative_to(ROOT)) for path in paths if path.exists()]


def _cells(line: str) -> list[str]:
    return [cell.strip().replace("\\|", "|") for cell in _CELL_END.split(line.strip())[1:-1]]
