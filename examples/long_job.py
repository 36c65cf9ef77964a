"""A job of several steps is killed in the middle (SIGKILL) and resumed by another process after the last finished step."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

from semel import Semel, current_run

STEPS = ("fetch", "resize", "upload", "notify")


def work(folder: Path, name: str) -> str:
    """One effect, written down where no crash can undo it."""
    with (folder / "ledger").open("a") as ledger:
        ledger.write(f"{name}\n")
    return f"{name} done"


def job(folder: Path, die_after: str) -> list[str]:
    run = current_run()
    results = []
    for name in STEPS:
        results.append(run.step(name, work, folder, name))
        print(f"  attempt {run.attempt}: {results[-1]}", flush=True)
        if name == die_after:
            os.kill(os.getpid(), signal.SIGKILL)
    return results


def worker(folder: Path, die_after: str) -> None:
    # A short lease, so that the example does not wait: the key of the killed worker is free after half a second.
    with Semel(f"sqlite:///{folder / 'semel.db'}", operation="thumbnails", lease=0.5) as once:
        outcome = once.execute("picture-7", job, folder, die_after, wait=10)
        print(f"finished by attempt {outcome.attempt}: {outcome.value}")


def main() -> None:
    with tempfile.TemporaryDirectory() as name:
        for die_after in ("resize", ""):
            ended = subprocess.run([sys.executable, __file__, name, die_after], check=False).returncode
            print("worker was killed" if ended < 0 else "worker ended", flush=True)
        ledger = (Path(name) / "ledger").read_text().split()
        print("each step ran once" if ledger == list(STEPS) else f"something is wrong: {ledger}")


if __name__ == "__main__":
    if len(sys.argv) == 3:
        worker(Path(sys.argv[1]), sys.argv[2])
    else:
        main()
