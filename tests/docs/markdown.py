"""Just enough Markdown to test pages: fenced blocks with their lines, links, headings, tables."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]

_FENCE = re.compile(r"^(?P<indent> *)(?P<ticks>`{3,})(?P<info>[^`]*)$")
_LINK = re.compile(r"(?<!!)\[[^\]]*\]\(([^)\s]+)\)")
_HEADING = re.compile(r"^#{1,6} +(.+?) *$")


def pages() -> list[Path]:
    """Every page that a reader may open: README, CHANGELOG, docs."""
    return [ROOT / "README.md", ROOT / "CHANGELOG.md", *sorted((ROOT / "docs").rglob("*.md"))]


def name_of(page: Path) -> str:
    return str(page.relative_to(ROOT))


@dataclass(frozen=True, slots=True)
class Block:
    """A fenced block. `line` is that of its first line of text, counted from 1."""

    language: str
    options: frozenset[str]
    line: int
    text: str

    def option(self, name: str) -> str | None:
        """The value in an info string such as ```python server=redis."""
        return next((word.partition("=")[2] for word in self.options if word.startswith(f"{name}=")), None)


def blocks(text: str) -> Iterator[Block]:
    lines = iter(enumerate(text.splitlines(), 1))
    for number, line in lines:
        opened = _FENCE.match(line)
        if opened is None:
            continue
        body: list[str] = []
        for _, inner in lines:
            if inner.strip() == opened["ticks"]:
                break
            body.append(inner.removeprefix(opened["indent"]))
        else:
            raise AssertionError(f"the block that begins in line {number} has no end")
        words = opened["info"].split()
        language = words[0] if words else ""
        yield Block(language, frozenset(words[1:]), number + 1, "\n".join(body) + "\n")


def prose(text: str) -> str:
    """The page without its fenced blocks."""
    kept: list[str] = []
    ticks = ""
    for line in text.splitlines():
        fence = _FENCE.match(line)
        if not ticks and fence is not None:
            ticks = fence["ticks"]
        elif ticks:
            ticks = "" if line.strip() == ticks else ticks
        else:
            kept.append(line)
    return "\n".join(kept)


def links(text: str) -> list[str]:
    return _LINK.findall(prose(text))


def anchors(text: str) -> set[str]:
    """The anchors that a page's headings have, spelled as the usual renderers do."""
    titles = (found[1] for line in prose(text).splitlines() if (found := _HEADING.match(line)))
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


def section(text: str, title: str) -> str:
    """What stands under a heading, up to the next one of the same or a higher level."""
    found = re.search(rf"^(#+) {re.escape(title)}$", text, re.MULTILINE)
    assert found is not None, f"there is no heading {title!r}"
    rest = text[found.end() :]
    end = re.search(rf"^#{{1,{len(found[1])}}} ", rest, re.MULTILINE)
    return rest[: end.start()] if end else rest


def rows(text: str) -> dict[str, list[str]]:
    """All table rows whose first cell is one name in backticks: name → the other cells."""
    found: dict[str, list[str]] = {}
    for line in text.splitlines():
        if not line.startswith("|"):
            continue
        first, *rest = (cell.strip().replace("\\|", "|") for cell in re.split(r"(?<!\\)\|", line)[1:-1])
        if name := re.fullmatch(r"`([^`]+)`", first):
            assert name[1] not in found, f"{name[1]!r} has two rows"
            found[name[1]] = rest
    return found
