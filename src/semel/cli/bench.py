"""`semel bench`: how quick keys are on a store of the user's own, beside one plain read of the same store."""

from __future__ import annotations

import asyncio
import statistics
import time
import uuid
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass, field
from typing import Annotated, Any, Final

import typer
from rich.console import Console
from rich.progress import track

from semel.cli.durations import lasting
from semel.cli.tables import say, show
from semel.errors import ConfigurationError
from semel.once import AsyncSemel

__all__ = ["bench"]

OPERATION: Final = "semel-bench"
_READ: Final = "read"
_VERBS: Final = ("first", "replay", _READ)
_ROUNDS: Final = 5
_RUN: Final = uuid.uuid4().hex
_STDERR: Final = Console(stderr=True)


@dataclass(slots=True)
class _Row:
    """One verb with so many callers: seconds of each call, and per round the calls in a second."""

    verb: str
    callers: int
    spent: list[float] = field(default_factory=list)
    rates: list[float] = field(default_factory=list)

    def data(self, read: _Row) -> dict[str, Any]:
        ordered = sorted(self.spent)
        ratios = [bare / rate for rate, bare in zip(self.rates, read.rates, strict=True)]
        return {
            "verb": self.verb,
            "callers": self.callers,
            "calls": len(ordered),
            "per_second": statistics.median(self.rates),
            "p50_ms": 1e3 * statistics.median(ordered),
            "p99_ms": 1e3 * ordered[min(len(ordered) - 1, len(ordered) * 99 // 100)],
            "times_a_read": statistics.median(ratios),
        }


def bench(
    url: Annotated[str, typer.Argument(help="The store URL that the program uses.")],
    callers: Annotated[int, typer.Option(min=1, help="Callers at a time, beside one alone.")] = 64,
    calls: Annotated[int, typer.Option(min=_ROUNDS, help="Calls of each kind.")] = 2_000,
    retention: Annotated[float, lasting("How long the records of the bench are kept.")] = 60,
    table: Annotated[str, typer.Option(help="The table= that the program uses (SQL).")] = "semel",
    prefix: Annotated[str, typer.Option(help="The prefix= that the program uses.")] = "semel",
    as_json: Annotated[bool, typer.Option("--json", help="Print data instead of a page.")] = False,
) -> None:
    """Time a first execution and a replay on this store, beside one plain read. Writes records, under the operation semel-bench.

    Rounds of the three take turns, so a busy machine disturbs all of them alike: trust the ratios more than the rates.
    """
    if url.startswith("memory:"):
        raise ConfigurationError("memory:// has no round trip to measure: give the URL of a store that lasts")
    if not retention >= 1:
        raise ConfigurationError(f"--retention must be 1 second or more, not {retention:g}")
    data = asyncio.run(_measure(url, sorted({1, callers}), calls, retention, table, prefix))
    if as_json:
        say(data)
        return
    show(
        ("", "callers", "calls/s", "p50 ms", "p99 ms", "× a read"),
        [
            (
                each["verb"],
                str(each["callers"]),
                f"{each['per_second']:,.0f}",
                f"{each['p50_ms']:.3f}",
                f"{each['p99_ms']:.3f}",
                f"{each['times_a_read']:.2f}",
            )
            for each in data
        ],
        empty="",
    )
    typer.echo(
        f"\nfirst: a new key, its function and its record. replay: the same key again. read: one record looked up.\n"
        f"× a read: seconds per call, as a multiple of a read with as many callers. Records of the operation {OPERATION} "
        f"expire after {retention:g} s; on SQL stores `semel purge` removes them."
    )


async def _measure(
    url: str, crowds: list[int], calls: int, retention: float, table: str, prefix: str
) -> list[dict[str, Any]]:
    rows = {(verb, crowd): _Row(verb, crowd) for crowd in crowds for verb in _VERBS}
    async with AsyncSemel(url, table=table, prefix=prefix, operation=OPERATION, retention=retention) as once:
        await once.execute(uuid.uuid4().hex, _nothing)  # connections, tables, scripts
        turns = [(number, row) for number in range(_ROUNDS) for row in rows.values()]
        for number, row in track(
            turns, "measuring", console=_STDERR, transient=True, disable=not _STDERR.is_terminal
        ):
            keys = [f"{row.callers}-{number}-{at}-{_RUN}" for at in range(calls // _ROUNDS)]
            await _round(row, _call_of(once, row.verb), keys)
    return [row.data(rows[_READ, row.callers]) for row in rows.values()]


def _nothing() -> None:
    """The function that runs once: what is measured is semel."""


def _call_of(once: AsyncSemel, verb: str) -> Callable[[str], Awaitable[object]]:
    if verb == _READ:
        return once.peek
    return lambda key: _executed(once, key, is_new=verb == "first")


async def _executed(once: AsyncSemel, key: str, *, is_new: bool) -> None:
    outcome = await once.execute(key, _nothing)
    if outcome.replayed is is_new:
        raise ConfigurationError(
            "a record was over before it was replayed: give a longer --retention, or fewer --calls"
        )


async def _round(row: _Row, call: Callable[[str], Awaitable[object]], keys: list[str]) -> None:
    left = iter(keys)
    began = time.perf_counter()
    await asyncio.gather(*(_caller(call, left, row.spent) for _ in range(row.callers)))
    row.rates.append(len(keys) / (time.perf_counter() - began))


async def _caller(call: Callable[[str], Awaitable[object]], left: Iterator[str], spent: list[float]) -> None:
    for key in left:
        began = time.perf_counter()
        await call(key)
        spent.append(time.perf_counter() - began)
