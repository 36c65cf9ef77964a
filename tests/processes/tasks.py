"""A Celery app whose Semel is made at import time in the parent of the prefork pool."""

from __future__ import annotations

import os
from typing import Any

from celery import Celery

from semel import Semel, current_run

app = Celery("tasks", broker=os.environ["SEMEL_BROKER"], backend=os.environ["SEMEL_BROKER"])
app.conf.update(worker_hijack_root_logger=False, broker_connection_retry_on_startup=True)
# Nobody is overtaken and no store is given up because the machine stands still.
PATIENT: dict[str, Any] = {"lease": 30.0, "timeout": 15.0, "settle_timeout": 20.0}
once = Semel(os.environ["SEMEL_URL"], tenant=os.environ["SEMEL_TENANT"], **PATIENT)
once.execute(f"warm-{os.getpid()}", lambda: os.getpid())  # the parent has connections and a heartbeat thread


def effect() -> int:
    handle = os.open(os.environ["SEMEL_EFFECTS"], os.O_APPEND | os.O_CREAT | os.O_WRONLY, 0o644)
    os.write(handle, (current_run().key + "\n").encode())
    os.close(handle)
    return os.getpid()


@app.task
def handle(key: str) -> int:
    return once.execute(key, effect, wait=20).value
