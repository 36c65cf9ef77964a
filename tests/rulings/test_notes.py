"""An error of the function reaches its caller, although it takes no notes (R2)."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from semel.layers import Layer
from semel.model import Answer
from semel.stores.memory import MemoryStore

from .conftest import Lab
from .test_failure import _over


@dataclasses.dataclass(frozen=True)
class Declined(Exception):
    code: str


class _Away(Layer):
    """A store that takes no outcome."""

    async def settle(self, ends: Any) -> list[Answer | Exception]:
        del ends
        raise OSError("away")


async def test_R2_an_error_that_takes_no_notes_is_not_hidden_by_one(light_lab: Lab) -> None:
    lab = light_lab
    away = _over(lab, _Away(MemoryStore()), settle_timeout=0.01)
    with pytest.raises(Declined, match="no_funds"):
        await lab.do(away.execute("k", lab.raising(Declined("no_funds"))))

    def undecided(error: Exception) -> Any:
        raise RuntimeError

    once = _over(lab, MemoryStore(), on_error=undecided)
    with pytest.raises(Declined, match="no_funds"):
        await lab.do(once.execute("k", lab.raising(Declined("no_funds"))))
    assert (await lab.do(once.peek("k"))).state == "unknown"
