"""R27: a failure that could not be written on the second connection leaves the key free, not held by nobody."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from semel import StoreUnavailable
from semel.layers import Layer
from semel.model import Answer, Settle
from tests.within.lab import Lab, wait
from tests.within.test_corners import coloured


class Lossy(Layer):
    """Takes no failure. Claims before it are granted, and what is released after it is."""

    trouble: Exception = StoreUnavailable("the settle was lost")

    async def settle(self, ends: Sequence[Settle]) -> list[Answer | Exception]:
        if any(end.error is not None for end in ends):
            raise self.trouble
        return await self.inner.settle(ends)


async def _free() -> str:
    return "free"


@pytest.mark.parametrize(
    "trouble",
    [StoreUnavailable("the settle was lost"), ValueError("no such failure")],
    ids=["lost", "refused"],
)
async def test_R27_a_claim_whose_failure_is_never_written_is_given_back(few: Lab, trouble: Exception) -> None:
    lab = few
    once = lab.face(settle_timeout=0.2, lease=120)
    once._store = lossy = Lossy(once._store)
    lossy.trouble = trouble
    await wait(once.create())
    tx = await lab.tx()
    await tx.begin()
    with pytest.raises(LookupError) as caught:
        await wait(
            once.within(tx.target).execute(
                "k1", lab.raising(tx, LookupError("no")), "k1", on_error="replay", on_unknown="hold"
            )
        )
    assert caught.value.__notes__
    await tx.commit()
    patient = lab.face()
    assert (await wait(patient.execute("k1", coloured(lab, _free), wait=30))).value == "free"
