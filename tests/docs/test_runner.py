"""The machinery of these tests has teeth: a page that is wrong fails."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.docs.markdown import ROOT, anchors, blocks, links, rows
from tests.docs.runner import Page


def run(folder: Path, text: str) -> int:
    # Pages are named relative to the repository; this one only pretends to be there.
    page = Page(ROOT / "docs" / "no-such-page.md", folder, lambda name: f"{name}://127.0.0.1:1/0")
    page.path = _Text(text)  # type: ignore[assignment]  # it only has to be read
    return page.run()


class _Text:
    stem = "page"

    def __init__(self, text: str) -> None:
        self._text = text

    def read_text(self, encoding: str) -> str:
        return self._text

    def relative_to(self, root: Path) -> str:
        return "page.md"


def fenced(*parts: tuple[str, str]) -> str:
    return "\n".join(f"```{info}\n{text}\n```\n" for info, text in parts)


def test_blocks_share_a_namespace_and_may_await(tmp_path: Path) -> None:
    text = fenced(
        ("python", "import asyncio\nx = 1"),
        ("python", "await asyncio.sleep(0)\nx += 1"),
        ("python", "print(x)"),
        ("text output", "2"),
    )
    assert run(tmp_path, text) == 3


@pytest.mark.parametrize(
    "text",
    [
        fenced(("python", "assert False")),
        fenced(("python", "print(1)"), ("text output", "2")),
        fenced(("python", "print(1)"), ("text output", "1 … 2")),
        fenced(("console", "$ python -c 'print(1)'\n2")),
        fenced(("console", "$ python -c 'raise SystemExit(1)'")),
        fenced(("console exit=2", "$ python -c 'raise SystemExit(1)'")),
        fenced(("console", "$ rm -rf nothing")),
        fenced(("console", "$ ./no-such-command")),
        fenced(("console", '$ pip install ".[no_such_extra]"')),
        fenced(("pythn", "print(1)")),
        fenced(("python", "url = 'redis://localhost:6379/0'")),
    ],
)
def test_a_wrong_page_fails(tmp_path: Path, text: str) -> None:
    with pytest.raises(AssertionError):
        run(tmp_path, text)


def test_the_documented_address_is_replaced_by_the_servers(tmp_path: Path) -> None:
    text = fenced(
        ("python server=redis", "print('redis://localhost:6379/0')"),
        ("text output", "redis://127.0.0.1:1/0"),
    )
    assert run(tmp_path, text) == 1


def test_a_block_may_be_a_file(tmp_path: Path) -> None:
    text = fenced(
        ("python file=one.py", "ONE = 1"), ("python", "from one import ONE\nprint(ONE)"), ("text output", "1")
    )
    assert run(tmp_path, text) == 2


def test_a_block_without_an_end_is_found() -> None:
    with pytest.raises(AssertionError, match="line 2"):
        list(blocks("text\n```python\nprint(1)\n"))


def test_tables_links_and_anchors_are_read() -> None:
    text = "# A `b` c\n\n| name | x |\n|---|---|\n| `one` | a \\| b |\n\n[l](x.md#a-b-c)\n```text\n[no](y.md)\n```\n"
    assert rows(text) == {"one": ["a | b"]}
    assert links(text) == ["x.md#a-b-c"]
    assert anchors(text) == {"a-b-c"}
