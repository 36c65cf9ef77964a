"""R29: a child that a function has forked, and that comes back out of it, ends nothing of its parent's run."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from semel import Semel


@pytest.mark.filterwarnings("ignore:.*multi-threaded.*:DeprecationWarning")
@pytest.mark.parametrize("raised", [ValueError, SystemExit])
def test_R29_a_child_that_comes_back_out_of_the_function_ends_nothing(
    tmp_path: Path, raised: type[BaseException]
) -> None:
    parent = os.getpid()
    ended: list[int] = []

    def forks() -> str:
        child = os.fork()
        if not child:
            raise raised
        ended.append(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
        return "of the parent"

    with Semel(f"sqlite:///{tmp_path}/semel.db", on_error="hold", on_unknown="hold") as once:
        try:
            outcome = once.execute("key", forks)
        except BaseException as error:
            if os.getpid() != parent:
                os._exit(3 if type(error) is raised else 4)
            raise
        assert ended == [3]
        assert not outcome.replayed
        assert once.execute("key", forks).value == "of the parent"
    assert ended == [3]
