"""The page of ./bench http: every package has a row, and what is not comparable says so."""

from __future__ import annotations

from pathlib import Path

import msgspec

from benches import http
from benches.core_parts.measure import Figure, Term
from benches.core_parts.page import Report, Section
from benches.http_parts import peers
from benches.http_parts.load import Rate, Target
from benches.http_parts.peer_apps import APPS

ROOT = Path(__file__).resolve().parents[2]


def figures() -> list[Figure]:
    made = []
    for name in APPS:
        for kind in peers.KINDS.values():
            wrong = "answers 422; " if (name, kind) == ("ichido", "replay") else ""
            rate, bare = Term("with it", 500.0, "/s"), Term("bare", 1000.0, "/s")
            if name != "bare":
                made.append(Figure(f"{kind}: {name}", rate, bare, note=f"{wrong}CPU 99 against 50 µs"))
    return made


def test_the_page_has_a_row_for_every_package(tmp_path: Path) -> None:
    section = Section("2026-01-01", "./bench http peers", "0.0", {"semel": "0"}, figures(), {"slow": "no"})
    http._write(Report({"peers": section}), tmp_path)
    text = (tmp_path / "http.md").read_text("utf-8")
    for name in APPS:
        assert (f"| {name} | 0.50 · 99 µs (1.98 ×)" in text) is (name != "bare")
    assert "answers 422: 0.50 · 99 µs (1.98 ×)" in text
    assert "left out: slow: no" in text
    assert "<svg" in (tmp_path / "http-peers.svg").read_text("utf-8")
    assert (
        msgspec.json.decode((tmp_path / "http.json").read_bytes(), type=Report).sections["peers"] == section
    )


def test_a_rate_that_did_other_work_is_noted() -> None:
    rate = Rate(1.0, 1.0, 1.0, 1.0, errors=0.0, ran=1.0)
    assert peers._note(Target("one", 0, 0, "fresh"), rate) == ""
    assert "runs the handler" in peers._note(Target("one", 0, 0, "replay"), rate)
    assert "only" in peers._note(Target("one", 0, 0, "none"), rate._replace(ran=0.2))


def test_every_package_is_locked() -> None:
    lock = (ROOT / "requirements" / "bench-http.txt").read_text("utf-8")
    for package in peers.PACKAGES:
        assert f"\n{package}==" in lock
