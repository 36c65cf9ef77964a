"""Settings of gunicorn: who has booted says so. A worker that is asked to end before that does not hear it."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any


def post_worker_init(worker: Any) -> None:
    """Called by gunicorn in each worker, when its signal handlers are there."""
    del worker
    Path(os.environ["SEMEL_BOOTED"], str(os.getpid())).touch()
