"""What differs between the Pythons that are supported, on those that this machine has besides its own."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from tests.pythons import VERSIONS, interpreter, packages

ROOT = Path(__file__).parents[2]
# A stored value comes back equal and of the same classes, whatever an interpreter tells of the inside of its objects.
ROUND_TRIPS = """
import dataclasses, datetime, decimal, uuid
from semel import Semel

@dataclasses.dataclass
class Inner:
    v: int

@dataclasses.dataclass(slots=True, kw_only=True)
class Slotted:
    s: set
    inner: Inner

@dataclasses.dataclass
class Outer:
    a: object
    when: datetime.datetime
    total: decimal.Decimal
    id: uuid.UUID
    inner: Inner
    slotted: Slotted

class Live:
    def __init__(self):
        self.x, self.d = (1, 2), decimal.Decimal("1.5")

def make() -> Outer:
    inner = Inner(3)
    moment = datetime.datetime(2026, 1, 1, tzinfo=datetime.UTC)
    return Outer((1, 2), moment, decimal.Decimal("1.10"), uuid.UUID(int=5), inner, Slotted(s={1}, inner=inner))

once = Semel("memory://")
for name, fn in {"typed": make, "live": lambda: vars(Live()), "nested": lambda: {"a": [vars(Live())]}}.items():
    first, again = once.execute(name, fn).value, once.execute(name, fn)
    assert again.replayed and repr(again.value) == repr(first), (name, first, again.value)
print("the same")
"""


@pytest.mark.parametrize("version", VERSIONS)
def test_results_come_back_unchanged_on_every_python(version: str, tmp_path: Path) -> None:
    python, where = packages(version, tmp_path, "msgspec>=0.20")
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT / "src"), where])}
    done = subprocess.run(
        [python, "-c", ROUND_TRIPS], env=environment, capture_output=True, text=True, check=False
    )
    assert done.stdout == "the same\n", done.stderr


@pytest.mark.long
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("version", VERSIONS[1:])
def test_the_tests_of_every_layer_pass_on_every_python(version: str, tmp_path: Path) -> None:
    python = interpreter(version)
    home = tmp_path / "venv"
    uv = ROOT / ".venv" / "bin" / "uv"
    own = str(home / "bin" / "python")
    commands: list[list[str | Path]] = [
        [uv, "venv", "--quiet", "--python", python, home],
        [uv, "pip", "install", "--quiet", "--python", own, "-r", ROOT / "requirements" / "dev.txt"],
        [uv, "pip", "install", "--quiet", "--python", own, "--no-deps", ROOT],
    ]
    for command in commands:
        subprocess.run(command, check=True)
    parts = [
        f"tests/{part}" for part in ("unit", "rulings", "contract", "within", "http", "grpc", "messaging")
    ]
    chosen = ["-k", "not every_python and not cluster and not sentinel"]
    tried = subprocess.run(
        [own, "-m", "pytest", "-q", "-n", "2", "-p", "no:cacheprovider", *parts, *chosen],
        cwd=ROOT,
        env=os.environ | {"SEMEL_TEST": "full"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert tried.returncode == 0, tried.stdout[-5000:]
