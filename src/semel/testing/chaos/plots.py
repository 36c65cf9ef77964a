"""Recovery times as an inline SVG: one dot per killed worker, by store and lease; the line is the lease itself."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

from semel.testing.chaos.verdicts import Result

__all__ = ["recovery_plot"]

_WIDTH, _HEIGHT, _LEFT, _BOTTOM, _TOP = 1000, 330, 46, 44, 12


def recovery_plot(results: Sequence[Result]) -> str:
    groups: dict[tuple[str, float], list[float]] = defaultdict(list)
    for each in results:
        if each.recovery is not None:
            groups[each.store, each.lease].append(each.recovery)
    if not groups:
        return "<p>No worker was killed before its effect in this run.</p>"
    order = sorted(groups)
    top = max(max(times) for times in groups.values()) * 1.08
    step = (_WIDTH - _LEFT - 8) / len(order)
    parts = [
        f'<svg viewBox="0 0 {_WIDTH} {_HEIGHT}" role="img" aria-label="recovery times" font-size="11" fill="currentColor">'
    ]
    for line in range(5):
        value = top * line / 4
        parts.append(
            f'<line x1="{_LEFT}" x2="{_WIDTH - 8}" y1="{_y(value, top):.1f}" y2="{_y(value, top):.1f}" stroke="#8884"/>'
            f'<text x="{_LEFT - 6}" y="{_y(value, top) + 4:.1f}" text-anchor="end">{value:.2f} s</text>'
        )
    for place, group in enumerate(order):
        parts += _column(group, sorted(groups[group]), _LEFT + step * (place + 0.5), step, top)
    return "\n".join([*parts, "</svg>"])


def _y(value: float, top: float) -> float:
    return _TOP + (_HEIGHT - _BOTTOM - _TOP) * (1 - value / top)


def _column(group: tuple[str, float], times: Sequence[float], x: float, step: float, top: float) -> list[str]:
    store, lease = group
    half = min(step * 0.35, 40)
    middle = times[len(times) // 2]
    parts = [
        (
            f'<line x1="{x - half:.1f}" x2="{x + half:.1f}" y1="{_y(lease, top):.1f}" y2="{_y(lease, top):.1f}"'
            ' stroke="#d99a17" stroke-width="2"/>'
        ),
        (
            f'<line x1="{x - half / 2:.1f}" x2="{x + half / 2:.1f}" y1="{_y(middle, top):.1f}" y2="{_y(middle, top):.1f}"'
            ' stroke="currentColor" stroke-width="2"/>'
        ),
        f'<text x="{x:.1f}" y="{_HEIGHT - 26}" text-anchor="middle">{store}</text>',
        f'<text x="{x:.1f}" y="{_HEIGHT - 10}" text-anchor="middle">{lease:g} s</text>',
    ]
    for place, time in enumerate(times):
        aside = x + ((place * 7919) % 13 - 6) / 6 * half * 0.7  # spread, the same in every rendering
        parts.append(
            f'<circle cx="{aside:.1f}" cy="{_y(time, top):.1f}" r="2.4" fill="#2e9d5b" fill-opacity=".55">'
            f"<title>{time:.3f} s, lease {lease:g} s, {store}</title></circle>"
        )
    return parts
