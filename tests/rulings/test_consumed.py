"""R1, R23: `consume` keeps no result, so a later `execute` or claim of the key is told so, and never gets a made-up None."""

from __future__ import annotations

import pytest

from semel import CodecError

from .conftest import Lab
from .tools import enter


async def test_R23_the_result_of_a_consumed_key_was_not_kept_and_is_not_none(lab: Lab) -> None:
    once = lab.face()
    assert await lab.do(once.consume("k", lab.effect(5)))
    outcome = await lab.do(once.execute("k", lab.effect(5)))
    assert (outcome.replayed, len(lab.effects)) == (True, 1)
    with pytest.raises(
        CodecError, match=r"not kept \(it was consumed.*`execute` for this key from the first"
    ):
        _ = outcome.value
    assert "not kept" in repr(outcome)
    assert await lab.do(once.consume("k", lab.effect(5))) is False


async def test_R23_a_typed_result_and_a_claim_are_told_too(light_lab: Lab) -> None:
    lab = light_lab
    once = lab.face()
    await lab.do(once.consume("k", lab.effect(5)))
    with pytest.raises(CodecError, match="consumed"):
        _ = (await lab.do(once.execute("k", lab.effect(5), result_type=int))).value
    claim = await enter(lab, once.claim("k"))
    assert claim.replayed
    with pytest.raises(CodecError, match="consumed"):
        _ = claim.value
    decorated = once(key="key", operation="default")(lab.fn(_count))
    with pytest.raises(CodecError, match="consumed"):
        await lab.do(decorated("k"))


def _count(key: str) -> int:
    return len(key)


async def test_a_function_that_gives_nothing_misses_nothing(light_lab: Lab) -> None:
    lab, once = light_lab, light_lab.face()

    def nothing() -> None:
        """Its result is known without being kept."""

    await lab.do(once.consume("k", lab.fn(nothing)))
    assert (await lab.do(once.execute("k", lab.fn(nothing)))).value is None


async def test_a_none_that_was_kept_is_none(lab: Lab) -> None:
    once = lab.face()
    for _ in range(2):
        assert (await lab.do(once.execute("k", lab.effect(None)))).value is None
