"""See the package."""

from __future__ import annotations

import sys

from semel.demo.program import main

if __name__ == "__main__":
    sys.exit(main())
