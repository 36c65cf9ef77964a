"""The store loses the record of a run that is still under way: what its owner knows of it is written again (R17, R25, R26)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from semel import StoreUnavailable, current_run
from semel.layers import Layer
from semel.runtime import run_sync
from semel.stores.memory import MemoryStore

from .conftest import Lab
from .tools import lapsed


class _Dies(BaseException):
    pass


class _Order:
    """A run of an id and two steps, whose record vanishes before its last one."""

    def __init__(self, lab: Lab, once: Any, vanish: Callable[[], Any], *, mails: bool) -> None:
        self.made: list[str] = []
        self.ids: list[str] = []
        self.first = True

        async def work() -> Any:
            run: Any = current_run()
            self.ids.append(await lab.do(run.new_id("ord")))
            await lab.do(run.step("charge", lab.fn(lambda: self.made.append("charge"))))
            if self.first:
                self.first = False
                once._engine().heart.remove(run)
                await vanish()
                if mails:
                    await lab.do(run.step("mail", lab.fn(lambda: self.made.append("mail"))))
                raise _Dies
            await lab.do(run.step("mail", lab.fn(lambda: self.made.append("mail"))))
            return self.ids[-1]

        self.fn = (lambda: run_sync(work())) if lab.colour == "sync" else work


@pytest.mark.parametrize("mails", [True, False], ids=["by the next step", "by the end"])
async def test_R26_what_was_done_before_the_record_was_lost_is_written_again(lab: Lab, mails: bool) -> None:
    once = lab.face(lease=1)

    async def vanish() -> None:
        await lapsed(lab, once, "k")
        assert await lab.do(once.forget("k"))

    order = _Order(lab, once, vanish, mails=mails)
    with pytest.raises(_Dies):
        await lab.do(once.execute("k", order.fn))
    outcome = await lab.do(once.execute("k", order.fn, wait=30))
    assert order.made == ["charge", "mail"]
    assert order.ids == [outcome.value] * 2
    assert outcome.ref == outcome.value


async def test_R26_steps_are_written_again_although_the_store_fails_in_between(light_lab: Lab) -> None:
    """The record is there again, without its steps: the next note, or the end, brings them."""
    lab = light_lab
    inner = MemoryStore()
    bad: list[int] = []

    class Flaky(Layer):
        async def note(self, note: Any) -> Any:
            if bad and bad.pop():
                raise StoreUnavailable("away")
            return await super().note(note)

    kind = type(lab.face())
    once = kind(Flaky(inner), lease=30)

    async def vanish() -> None:
        inner._records.clear()
        bad.extend([1, 0])  # the first note finds nothing, the second one has no answer

    order = _Order(lab, once, vanish, mails=True)
    with pytest.raises(_Dies):
        await lab.do(once.execute("k", order.fn))
    outcome = await lab.do(once.execute("k", order.fn, wait=30))
    assert order.made == ["charge", "mail"]
    assert order.ids == [outcome.value] * 2
    await lab.do(once.close())
