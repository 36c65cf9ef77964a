"""Recovery times as an inline SVG: a panel for each lease, a column for each store, a dot for each killed worker."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from typing import Final

from semel.testing.chaos.report import Recovery

__all__ = ["recovery_plot"]

_WIDTH: Final = 1100
_HEIGHT: Final = 300
_LEFT: Final = 48
_BOTTOM: Final = 62
_TOP: Final = 34
_GAP: Final = 18


def recovery_plot(recovery: Sequence[Recovery]) -> str:
    if not recovery:
        return "<p>No worker was killed before its effect in this run.</p>"
    groups: dict[float, dict[str, list[float]]] = defaultdict(dict)
    for each in recovery:
        if each.times:
            groups[each.lease][each.store] = each.times
    if not groups:
        return "<p>The times of single kills were not kept by the version that made this run; the table has their quantiles.</p>"
    most = max(time for stores in groups.values() for times in stores.values() for time in times)
    width = (_WIDTH - _LEFT - 8 - _GAP * (len(groups) - 1)) / len(groups)
    top = max(most, *groups) * 1.08
    parts = [
        (
            '<div class="scroll" role="region" aria-label="recovery times" tabindex="0">'
            f'<svg class="plot" viewBox="0 0 {_WIDTH} {_HEIGHT}" role="img" font-size="12">'
            "<title>Seconds from a worker's death to its effect, by lease and store</title>"
        )
    ]
    parts += _scale(top)
    for place, lease in enumerate(sorted(groups)):
        parts += _panel(lease, groups[lease], _LEFT + place * (width + _GAP), width, top)
    legend = "Each dot is one killed worker; the long line is the lease, the short one the median."
    return "\n".join(
        [*parts, f'<text class="soft" x="{_LEFT}" y="{_HEIGHT - 6}">{legend}</text>', "</svg></div>"]
    )


def _y(value: float, top: float) -> float:
    return _TOP + (_HEIGHT - _BOTTOM - _TOP) * (1 - value / top)


def _scale(top: float) -> Iterator[str]:
    step = next(each for each in (0.1, 0.2, 0.25, 0.5, 1.0, 2.0, 5.0, 10.0, 100.0) if top / each <= 7)
    for line in range(int(top / step) + 1):
        y = _y(line * step, top)
        yield f'<line class="grid" x1="{_LEFT}" x2="{_WIDTH - 8}" y1="{y:.1f}" y2="{y:.1f}"/>'
        yield f'<text class="soft" x="{_LEFT - 6}" y="{y + 4:.1f}" text-anchor="end">{line * step:g} s</text>'


def _panel(
    lease: float, stores: dict[str, list[float]], left: float, width: float, top: float
) -> Iterator[str]:
    y = _y(lease, top)
    yield f'<text x="{left + width / 2:.1f}" y="20" text-anchor="middle" font-weight="600">lease {lease:g} s</text>'
    yield f'<line class="lease" x1="{left:.1f}" x2="{left + width:.1f}" y1="{y:.1f}" y2="{y:.1f}"/>'
    step = width / len(stores)
    for place, store in enumerate(sorted(stores)):
        x = left + step * (place + 0.5)
        yield from _column(sorted(stores[store]), x, step, top)
        below = _HEIGHT - _BOTTOM + 16 + 13 * (place % 2)  # neighbours' names have no room side by side
        yield f'<text x="{x:.1f}" y="{below}" text-anchor="middle" font-size="11">{store}</text>'


def _column(times: Sequence[float], x: float, step: float, top: float) -> Iterator[str]:
    half = min(step * 0.38, 26)
    for place, time in enumerate(times):
        aside = (
            x + ((place * (31 * place + 17)) % 23 - 11) / 11 * half * 0.8
        )  # spread, the same in every rendering
        yield f'<circle cx="{aside:.1f}" cy="{_y(time, top):.1f}" r="3"/>'
    middle = _y(times[len(times) // 2], top)
    yield f'<line class="middle" x1="{x - half * 0.6:.1f}" x2="{x + half * 0.6:.1f}" y1="{middle:.1f}" y2="{middle:.1f}"/>'
