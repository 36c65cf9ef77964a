"""What a command says of arguments that it cannot use."""

from __future__ import annotations

from collections.abc import Callable

import pytest

__all__ = ["refused"]


def refused(main: Callable[[], object], capsys: pytest.CaptureFixture[str]) -> str:
    """The words on stderr of a command that leaves with 2."""
    with pytest.raises(SystemExit) as left:
        main()
    assert left.value.code == 2
    return capsys.readouterr().err
