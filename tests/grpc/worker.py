"""A server that a test kills in the middle of a call: `python -m tests.grpc.worker COLOUR URL TENANT EFFECTS`."""

from __future__ import annotations

import sys
import threading
from typing import Any

from tests.grpc.lab import Lab, Loop, shop


def main(colour: str, url: str, tenant: str, effects: str) -> None:
    """Serve, say the port, then say that a call has begun, which ends when a line comes in."""

    def act(request: Any, say: Any) -> Any:
        print("begun", flush=True)
        sys.stdin.readline()  # until it is told to go on, or for ever
        return shop.Made(id="made by a zombie")

    lab = Lab(colour, url, Loop())
    lab.tenant = tenant
    lab.act = act
    lab.serve(effects=effects, lease=0.5)
    print(lab.port, flush=True)
    threading.Event().wait()


if __name__ == "__main__":
    main(*sys.argv[1:])
