"""Other Pythons: those on this machine, each with a folder of packages built for it, and what newer ones refuse."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from urllib.parse import SplitResult, urlsplit

import pytest

VERSIONS = ("3.11", "3.12", "3.13")


def strict_urlsplit(url: str) -> SplitResult:
    """urlsplit as the newest Pythons have it (3.12.9, 3.13.2): brackets are around a whole host, or there are none."""
    parts = urlsplit(url)
    host = parts.netloc.rpartition("@")[2]
    if "[" in host and not re.fullmatch(r"\[[0-9a-f:.]*\](:\d*)?", host):
        raise ValueError(url)
    return parts


def interpreter(version: str) -> str:
    """One that runs: a shim on PATH may only say that it would. Skips the test where there is none."""
    if version == f"{sys.version_info.major}.{sys.version_info.minor}":
        return sys.executable
    folders = [
        *map(str, Path.home().glob(f".pyenv/versions/{version}.*/bin")),
        *os.environ["PATH"].split(os.pathsep),
    ]
    for folder in folders:
        python = shutil.which(f"python{version}", path=folder)
        if python and subprocess.run([python, "-c", ""], capture_output=True, check=False).returncode == 0:
            return python
    pytest.skip(f"SERVER MISSING: no Python {version} on this machine; put python{version} on PATH")


def packages(version: str, folder: Path, *wanted: str) -> tuple[str, str]:
    """That interpreter, and where its packages are; for the running one its own."""
    python = interpreter(version)
    if python == sys.executable:
        return python, os.pathsep.join(path for path in sys.path if path.endswith("site-packages"))
    target = folder / version
    made = subprocess.run(
        [python, "-m", "pip", "install", "--quiet", "--target", target, *wanted],
        capture_output=True,
        text=True,
        check=False,
    )
    if made.returncode:
        pytest.skip(f"SERVER MISSING: {' '.join(wanted)} cannot be had for {python}: {made.stderr[-300:]}")
    return python, str(target)
