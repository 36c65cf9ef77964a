"""A WSGI app whose Semel is made at import time, as users do, and used after the server has forked."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable
from typing import Any

from semel import Semel, current_run

# Nobody is overtaken and no store is given up because the machine stands still.
PATIENT: dict[str, Any] = {"lease": 30.0, "timeout": 15.0, "settle_timeout": 20.0}
once = Semel(os.environ["SEMEL_URL"], tenant=os.environ["SEMEL_TENANT"], **PATIENT)
if os.environ.get("SEMEL_WARM"):
    # Used before the fork as well: the children must drop what the parent opened.
    once.execute(f"warm-{os.getpid()}", lambda: os.getpid())


def effect() -> str:
    path = os.environ["SEMEL_EFFECTS"]
    handle = os.open(path, os.O_APPEND | os.O_CREAT | os.O_WRONLY, 0o644)
    os.write(handle, (current_run().key + "\n").encode())
    os.close(handle)
    time.sleep(0.02)
    return f"made by {os.getpid()}"


def application(environ: dict[str, Any], start_response: Callable[..., Any]) -> Iterable[bytes]:
    outcome = once.execute(environ["QUERY_STRING"], effect, wait=20)
    start_response("200 OK", [("Content-Type", "text/plain")])
    return [f"{outcome.value} {outcome.replayed}".encode()]
