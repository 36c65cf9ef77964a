"""Clients in processes of their own, to be killed. Imports once, then forks a client for each line of its input.

A line is a JSON list [library, url, store, action, point or ""]; the answers are the child's process id and, when it
has ended, its exit code. With a point of `semel.points` ("claim.won:1") the client kills itself when that is reached.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import traceback

from semel import points
from tests.http.libraries import LIBRARIES, Caller


def run(library: str, url: str, store: str, action: str, where: str) -> None:
    if where:
        name, _, count = where.partition(":")
        left = int(count)

        def die(reached: str) -> None:
            nonlocal left
            left -= reached == name
            if left == 0:
                os.kill(os.getpid(), signal.SIGKILL)

        points.listen(die)
    chosen = next(each for each in LIBRARIES if each == library)
    Caller(chosen, keys=store).post(url, json={"cents": 500}, timeout=60, wishes={"action": action})


def main() -> None:
    for line in sys.stdin:
        child = os.fork()
        if child == 0:
            try:
                run(*json.loads(line))
            except BaseException:
                traceback.print_exc()
                os._exit(1)
            os._exit(0)
        print(child, flush=True)
        print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)


if __name__ == "__main__":
    main()
