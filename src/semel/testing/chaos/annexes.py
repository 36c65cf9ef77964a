"""What other proofs have left in the report's folder: `simulation.json` and `mutants.json` become sections of the page.

Such a file is an object. Its plain values are facts, shown in order; its lists of objects are tables, with a column for each
name. `title` is the heading; a fact called `command` is how the run is made again.
"""

from __future__ import annotations

from collections.abc import Iterator
from html import escape
from pathlib import Path
from typing import Any, Final

import msgspec

from semel.errors import ConfigurationError

__all__ = ["ANNEXES", "Annex", "annexes", "as_html", "as_markdown"]

ANNEXES: Final = {"simulation": "The simulator", "mutants": "Planted bugs"}
_MOST: Final = 300
"""Rows of a table that a page shows; the rest is counted."""


class Annex(msgspec.Struct, kw_only=True):
    name: str
    title: str
    facts: dict[str, str]
    tables: dict[str, list[dict[str, Any]]]


def annexes(folder: Path) -> list[Annex]:
    """Those that are there. A file that is not an object is refused by its name."""
    return [
        _annex(folder / f"{name}.json", title)
        for name, title in ANNEXES.items()
        if (folder / f"{name}.json").exists()
    ]


def _annex(path: Path, title: str) -> Annex:
    try:
        found = msgspec.json.decode(path.read_bytes(), type=dict[str, Any])
    except msgspec.DecodeError as error:
        raise ConfigurationError(
            f"{path} is not a JSON object ({error}): make it again, or remove it"
        ) from error
    tables = {
        name: [row for row in value if isinstance(row, dict)]
        for name, value in found.items()
        if isinstance(value, list)
    }
    facts = {
        name: _text(value) for name, value in found.items() if name != "title" and not isinstance(value, list)
    }
    return Annex(name=path.stem, title=str(found.get("title", title)), facts=facts, tables=tables)


def _text(value: Any) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{_text(each)} {name}" for name, each in value.items())
    match value:
        case bool() | str():
            return str(value)
        case int():
            return f"{value:,}"  # all of it: a seed that is rounded repeats nothing
        case float():
            return f"{value:,g}"
    return str(value)


def _columns(rows: list[dict[str, Any]]) -> list[str]:
    return list(dict.fromkeys(name for row in rows for name in row))


def as_html(annex: Annex) -> str:
    parts = [f'<h2 id="{annex.name}">{escape(annex.title)}</h2><dl>']
    parts += [f"<dt>{escape(name)}</dt><dd>{escape(text)}</dd>" for name, text in annex.facts.items()]
    parts.append("</dl>")
    for name, rows in annex.tables.items():
        columns = _columns(rows)
        head = "".join(f"<th scope=col>{escape(column)}</th>" for column in columns)
        body = "".join(
            "<tr>" + "".join(f"<td>{escape(_text(row.get(column, '')))}</td>" for column in columns) + "</tr>"
            for row in rows[:_MOST]
        )
        more = f"<p>and {len(rows) - _MOST} more</p>" if len(rows) > _MOST else ""
        parts.append(
            f"<details><summary>{escape(name)}: {len(rows)}</summary>"
            f'<div class="scroll" role="region" aria-label="{escape(name)}" tabindex="0"><table class="prose">'
            f"<thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>{more}</details>"
        )
    return "".join(parts)


def as_markdown(annex: Annex) -> Iterator[str]:
    yield f"## {annex.title}"
    yield ""
    for name, text in annex.facts.items():
        yield f"* {name}: {f'`{text}`' if name == 'command' else text}"
    for name, rows in annex.tables.items():
        columns = _columns(rows)
        yield ""
        yield f"### {name}"
        yield ""
        yield "| " + " | ".join(columns) + " |"
        yield "|---" * len(columns) + "|"
        for row in rows[:_MOST]:
            yield (
                "| " + " | ".join(_text(row.get(column, "")).replace("|", "\\|") for column in columns) + " |"
            )
