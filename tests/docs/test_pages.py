"""Every block of the README and the docs runs, prints what the page says, and needs no more than the page says."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.docs.markdown import blocks, name_of, pages
from tests.docs.runner import Page, servers

FIXTURES = {"redis": "redis_server", "postgres": "postgres_server", "mariadb": "mariadb_server"}


def _runs(page: Path) -> bool:
    return any(block.language in {"python", "console"} for block in blocks(page.read_text("utf-8")))


def _cases() -> list[object]:
    return [
        pytest.param(page, id=name_of(page), marks=[pytest.mark.services] if servers(page) else [])
        for page in pages()
        if _runs(page)
    ]


@pytest.mark.timeout(360)  # a page of commands is dozens of processes
@pytest.mark.parametrize("page", _cases())
@pytest.mark.filterwarnings("error")
def test_every_block_of_the_page_runs(
    page: Path, tmp_path: Path, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    def url_of(server: str) -> str:
        started = request.getfixturevalue(FIXTURES[server])
        return str(started.url if server == "redis" else started.database())

    assert Page(page, tmp_path, url_of).run() > 0


def test_the_readme_and_the_quickstart_are_among_them() -> None:
    ran = {name_of(page) for page in pages() if _runs(page)}
    assert {"README.md", "docs/quickstart.md"} <= ran
