"""Where a campaign writes its report."""

from __future__ import annotations

import tempfile
from pathlib import Path

from semel.errors import ConfigurationError

__all__ = ["see_to"]


def see_to(report: Path) -> None:
    """Before minutes of work: the folder is there and can be written."""
    try:
        report.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=report):
            pass
    except OSError as error:
        raise ConfigurationError(
            f"--report {report}: nothing can be written there ({error.strerror}); name another folder"
        ) from error
