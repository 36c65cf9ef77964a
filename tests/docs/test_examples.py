"""Every example is a program that runs, quickly, and says what happened."""

from __future__ import annotations

import resource
import subprocess
import sys
from pathlib import Path

import pytest

from tests.docs.markdown import ROOT

EXAMPLES = sorted((ROOT / "examples").glob("*.py"))
# What a reader must see at the end: the point of the example, not merely the absence of an error.
SAYS = {
    "async_service": "50 requests, 5 orders made",
    "charge_card": "1 charge on the bank's books",
    "consumer": "3 messages handled, 3 redeliveries skipped",
    "create_order": "1 row",
    "django_orders": "4 requests, 1 payment made",
    "fastapi_orders": "8 requests, 2 orders made",
    "flask_orders": "4 requests, 1 order made",
    "http_client": "killed once, sent twice, 1 charge on the server's books",
    "long_job": "each step ran once",
    "order_service": "5 orders, 5 parcels",
    "probe": "resolved by ann",
}
SECONDS = (
    10  # of the processor, far above what they take; by the clock they take as long as this machine is busy
)


def _used() -> float:
    children = resource.getrusage(resource.RUSAGE_CHILDREN)
    return children.ru_utime + children.ru_stime


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda path: path.stem)
def test_an_example_runs_and_says_what_happened(example: Path, tmp_path: Path) -> None:
    before = _used()
    done = subprocess.run(
        [sys.executable, "-W", "error", example],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert SAYS[example.stem] in done.stdout, done.stdout
    assert done.stderr == ""
    assert _used() - before < SECONDS
    assert list(tmp_path.iterdir()) == [], "an example leaves nothing behind"


def test_there_is_an_example_for_everything_that_is_expected() -> None:
    assert {example.stem for example in EXAMPLES} == set(SAYS)
