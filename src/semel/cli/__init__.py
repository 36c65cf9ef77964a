"""The `semel` command. Each command is documented in docs/reference/cli.md, and a test says so."""

from __future__ import annotations

import sys

from semel.errors import ConfigurationError, SemelError

__all__ = ["main"]


def main() -> None:
    """Run the command line; an error that semel raises is a message and exit code 2, not a traceback."""
    try:
        from semel.cli.commands import app
    except ImportError as missing:
        sys.exit(f'semel: the command line needs the extra "cli": pip install "semel[cli]" ({missing})')
    try:
        app()
    except ConfigurationError as error:
        sys.exit(_fail(error, 2))
    except SemelError as error:
        sys.exit(_fail(error, 3))


def _fail(error: SemelError, code: int) -> int:
    print(f"semel: {error}", file=sys.stderr)
    return code
