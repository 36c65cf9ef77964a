"""Nothing that is stored can run code: no pickle is within reach, and no stored byte names a class or a function."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from semel import CodecError, Semel
from semel.codec import encoder_for

ROOT = Path(__file__).parents[2]
# Imports every module of the package, and then looks for anything of pickle's kind in what those modules hold.
LOOK = """
import importlib, pathlib, sys, types
import semel
WRONG = {"pickle", "_pickle", "marshal", "shelve", "dill", "cloudpickle", "jsonpickle", "joblib"}
root = pathlib.Path(semel.__file__).parent
for path in sorted(root.rglob("*.py")):
    parts = path.relative_to(root).with_suffix("").parts
    # What ships for tests starts programs, ours and a peer's: it reads nothing that a store holds.
    if parts[0] != "testing" and parts[-1] != "__main__":
        importlib.import_module(".".join(("semel", *parts)).removesuffix(".__init__"))
held = []
for name, module in sorted(sys.modules.items()):
    if name.partition(".")[0] == "semel":
        for attribute, value in vars(module).items():
            kind = type(value)
            home = value.__name__ if kind is types.ModuleType else kind.__module__
            if kind in (type, types.FunctionType, types.BuiltinFunctionType):
                home = value.__module__
            if isinstance(home, str) and home.partition(".")[0] in WRONG:
                held.append(f"{name}.{attribute}")
print(len([name for name in sys.modules if name.startswith("semel")]), held)
"""


def test_no_module_of_the_package_holds_pickle_or_its_kind() -> None:
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", LOOK],
        capture_output=True,
        text=True,
        check=False,
        env=os.environ | {"PYTHONPATH": str(ROOT / "src")},
    )
    assert done.returncode == 0, done.stderr
    number, _, held = done.stdout.strip().partition(" ")
    assert held == "[]"
    assert int(number) > 80, "the whole package was looked at"


class Bomb:
    """What pickle would run when it reads it back."""

    gone_off = False

    def __reduce__(self) -> tuple[Any, ...]:
        return setattr, (Bomb, "gone_off", True)

    def __getstate__(self) -> dict[str, Any]:
        Bomb.gone_off = True
        return {}


@pytest.mark.parametrize("inside", [lambda bomb: bomb, lambda bomb: [bomb], lambda bomb: {"a": (bomb,)}])
def test_an_object_is_refused_and_not_taken_apart(inside: Any) -> None:
    with pytest.raises(CodecError):
        encoder_for(None).encode(inside(Bomb()))
    assert not Bomb.gone_off
    with Semel("memory://") as once:
        with pytest.raises(CodecError):
            once.execute("k", lambda: inside(Bomb()))
        with pytest.raises(CodecError):
            once.execute("k", lambda: "again")
    assert not Bomb.gone_off


def test_a_stored_result_cannot_name_a_class_that_the_reader_did_not() -> None:
    from dataclasses import dataclass

    @dataclass
    class Mine:
        text: str

    written = encoder_for(Mine).encode(Mine("x"))
    assert encoder_for(Mine).decode(written) == Mine("x")
    for reader in (encoder_for(None), encoder_for(str), encoder_for(dict)):
        with pytest.raises(CodecError, match="Mine"):
            reader.decode(written)
