"""The `semel` command. Each command is documented in docs/reference/cli.md, and a test says so."""

from __future__ import annotations

import errno
import io
import os
import sys
from contextlib import suppress

from semel.errors import ConfigurationError, InvalidKey, SemelError
from semel.stores.unfit import NoTables

__all__ = ["main"]

_FULL = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EIO})


def main() -> None:
    """Run the command line; an error that semel raises is a message and exit code 2 or 3, not a traceback."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")  # what a terminal cannot show is no reason to fail
    try:
        from semel.cli.commands import app
    except ImportError as missing:
        sys.exit(_fail(f'the command line needs the extra "cli": pip install "semel[cli]" ({missing})', 2))
    try:
        app()
    except NoTables as error:
        sys.exit(_fail(f"{error.what}: correct the URL, or name the program's --table", 2))
    except (ConfigurationError, InvalidKey) as error:
        sys.exit(_fail(error, 2))
    except SemelError as error:
        sys.exit(_fail(error, 3))
    except OSError as error:
        if error.errno not in _FULL:
            raise
        # What is still in its buffer would be written, and fail, once more at the end.
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        sys.exit(
            _fail(f"its output could not be written, and what it was asked to do may be done: {error}", 3)
        )


def _fail(said: SemelError | str, code: int) -> int:
    with suppress(OSError):  # on the same full disk, say: the code tells it still
        print(f"semel: {said}", file=sys.stderr)
    return code
