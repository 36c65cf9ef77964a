"""Links inside the repository lead somewhere, every page can be reached, and no page names a figure made by hand."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.docs.markdown import ROOT, anchors, links, name_of, pages, prose

# Speed belongs to pages that ./bench writes; a number typed by hand is out of date the day after.
_SPEED = re.compile(
    r"""\d[\d.,]*\s*k?\s*(?:ops|calls|req(?:uest)?s?|keys|records|messages|claims)\s*(?:/|per|a)\s*s(?:ec(?:ond)?)?\b
      | \d[\d.,]*\s*(?:µs|us|microseconds?)\b
      | \d[\d.,]*\s*(?:×|x|times|%|percent)\s+(?:as\s+fast|faster|slower|cheaper|less|the\s+(?:rate|speed|throughput))""",
    re.VERBOSE | re.IGNORECASE,
)


@pytest.mark.parametrize("page", pages(), ids=name_of)
def test_links_lead_somewhere(page: Path) -> None:
    broken = [link for link in links(page.read_text("utf-8")) if not _leads_somewhere(page, link)]
    assert broken == []


def _leads_somewhere(page: Path, link: str) -> bool:
    if re.match(r"https?://", link):
        return True  # the network is not asked
    path, _, anchor = link.partition("#")
    target = (page.parent / path).resolve() if path else page
    if not target.is_relative_to(ROOT) or not target.exists():
        return False
    return not anchor or anchor in anchors(target.read_text("utf-8"))


def test_every_page_is_reached_from_the_readme() -> None:
    reached: set[Path] = set()
    todo = [ROOT / "README.md"]
    while todo:
        page = todo.pop()
        if page in reached:
            continue
        reached.add(page)
        for link in links(page.read_text("utf-8")):
            target = (page.parent / link.partition("#")[0]).resolve()
            if target.suffix == ".md" and target.is_relative_to(ROOT) and target.exists():
                todo.append(target)
    assert [name_of(page) for page in pages() if page not in reached] == []


def test_every_page_has_one_title() -> None:
    for page in pages():
        titles = re.findall(r"^# .+$", prose(page.read_text("utf-8")), re.MULTILINE)
        assert len(titles) == 1, f"{name_of(page)}: {titles}"


# A decision is the record of a day and may cite the measurement that led to it; pages of ./bench are written by it.
LASTING = [page for page in pages() if page.parent.name not in ("decisions", "bench")]


@pytest.mark.parametrize("page", LASTING, ids=name_of)
def test_no_speed_is_written_by_hand(page: Path) -> None:
    assert [found[0] for found in _SPEED.finditer(prose(page.read_text("utf-8")))] == []


@pytest.mark.parametrize(
    "text", ["40,000 calls/s", "3.5 µs a call", "5 x faster", "2 times as fast", "12k ops per second"]
)
def test_the_search_for_figures_finds_them(text: str) -> None:
    assert _SPEED.search(f"It does {text} here.")
