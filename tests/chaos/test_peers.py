"""DBOS through the cases that apply to it. Minutes: a process of its own takes seconds to start, so in the long run only."""

from __future__ import annotations

from pathlib import Path

import pytest

from semel import ConfigurationError
from semel.testing.chaos.peers import CASES, run_peer

PYTHON = Path(__file__).parents[2] / ".venv" / "peers" / "bin" / "python"


def test_a_python_without_the_peer_is_refused_with_the_remedy() -> None:
    with pytest.raises(ConfigurationError, match=r"requirements/bench\.txt"):
        run_peer(Path("no-such-python"))


@pytest.mark.long
@pytest.mark.services
@pytest.mark.timeout(1800)
@pytest.mark.skipif(not PYTHON.exists(), reason="PEER MISSING: `./bench core peers` makes .venv/peers")
def test_dbos_does_what_its_documentation_promises_in_both_directions() -> None:
    found = run_peer(PYTHON)
    assert len(found.findings) == len(CASES)
    assert not [each for each in found.findings if not each.agrees]
