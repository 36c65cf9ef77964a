"""Sealed records that somebody looks after: lists, reconciles, damage and its repair."""

from __future__ import annotations

import copy
from typing import Any

import msgspec
import pytest

from semel import Found, OutcomeUnknown, Semel, current_run, steps
from semel.calls import nothing_to_run
from semel.cli.records import lines
from semel.codec import preview
from semel.errors import CodecError, ConfigurationError
from semel.layers import Layer
from semel.layers.encrypt import Encrypt, Ring
from semel.runtime import run_sync
from semel.seals import Sealed, key_name
from semel.stores.memory import MemoryStore

from .conftest import Lab
from .test_failure import _over

RING = {"2026-a": b"a" * 32}
OTHER = {"2026-b": b"b" * 32}


async def _lost(lab: Lab, once: Any, key: str, **options: Any) -> None:
    """A run that made a step, and of which nothing more is known."""

    def plain() -> None:
        current_run().step("charge", lambda: "4111")
        raise SystemExit

    async def coroutine() -> None:
        run: Any = current_run()
        await run.step("charge", lambda: "4111")
        raise SystemExit

    with pytest.raises(SystemExit):
        await lab.do(once.execute(key, plain if lab.colour == "sync" else coroutine, **options))


@pytest.mark.parametrize("more", [{}, {"namespace": "shop", "cache": 10}], ids=["alone", "layers"])
async def test_R26_a_probe_settles_a_sealed_run_with_steps(lab: Lab, more: dict[str, Any]) -> None:
    once = lab.face(encrypt=RING, **more)
    await _lost(lab, once, "k", operation="pay", on_unknown="hold")
    seen: list[Any] = []

    def probe(record: Any) -> Found:
        seen.append((record.scope.key, list(current_run().steps), list(steps.decode(record.steps))))
        return Found("paid")

    once.recovery("pay", probe=probe, tenant=lab.tenant)
    report = await lab.do(once.reconcile())
    assert (report.settled, report.failed) == (1, 0)
    assert seen == [("k", ["charge"], ["charge"])]
    assert (await lab.do(once.execute("k", lab.effect(), operation="pay"))).value == "paid"
    assert lab.effects == []


async def test_records_are_listed_as_they_are_peeked_at(light_lab: Lab) -> None:
    lab, store = light_lab, MemoryStore()
    once, stranger = _over(lab, store, encrypt=RING), _over(lab, store, encrypt=OTHER)
    await lab.do(once.execute("k", lab.effect("4111")))
    (record,) = await lab.do(once.find(states=["done"]))
    assert record.result == (await lab.do(once.peek("k"))).result
    assert preview(record.result) == "4111"
    (sealed,) = await lab.do(stranger.find(states=["done"]))  # one record without a key spoils no list
    with pytest.raises(CodecError):
        preview(sealed.result)
    assert await lab.do(stranger.peek("k")) == sealed
    assert await lab.do(stranger.peek(sealed.scope)) == sealed
    assert (sealed.state, sealed.attempts, key_name(sealed.result)) == ("done", 1, "2026-a")


async def test_R26_what_a_reconcile_cannot_read_is_left_to_a_person(light_lab: Lab) -> None:
    lab, store = light_lab, MemoryStore()
    await _lost(lab, _over(lab, store, encrypt=RING), "k", operation="pay", on_unknown="hold")
    stranger = _over(lab, store, encrypt=OTHER)
    stranger.recovery("pay", probe=lambda record: Found("paid"))
    report = await lab.do(stranger.reconcile())
    assert (report.settled, report.failed, report.left) == (0, 0, ("k",))


def test_semel_show_says_that_sealed_steps_cannot_be_read_without_their_key() -> None:
    store = MemoryStore()
    once = Semel(store, encrypt=RING, on_unknown="hold")

    def lost() -> None:
        current_run().step("charge", lambda: "4111")
        raise SystemExit

    with pytest.raises(SystemExit):
        once.execute("k", lost)
    record = Semel(store).peek("k")
    assert record is not None
    assert "cannot be read here" in dict(lines(record, []))["steps"]
    mine = once.peek("k")
    assert mine is not None
    assert "done" in dict(lines(mine, []))["step charge"]


DAMAGED = [
    b"\xe1",
    b"\xe1\x06",
    b"\xe1\x062026",
    b"\xe1\x062026-a",
    b"\xe1\x062026-a123",
    b"\xe1\xff1",
    b"junk",
]


@pytest.mark.parametrize("damage", DAMAGED, ids=repr)
async def test_R15_a_damaged_sealed_value_is_unreadable_and_repaired_by_resolve(
    light_lab: Lab, damage: bytes
) -> None:
    lab, store = light_lab, MemoryStore()
    once = _over(lab, store, encrypt=RING)
    await lab.do(once.execute("k", lab.effect()))
    ((scope, record),) = store._records.items()
    store._records[scope] = msgspec.structs.replace(record, result=damage)
    with pytest.raises(OutcomeUnknown, match="cannot be read") as caught:
        await lab.do(once.execute("k", lab.effect()))
    assert caught.value.unreadable
    assert (await lab.do(once.peek("k"))).result == damage
    await lab.do(once.resolve("k", value="looked up"))
    assert (await lab.do(once.execute("k", lab.effect()))).value == "looked up"
    assert len(lab.effects) == 1


def test_every_part_of_a_sealed_value_is_refused_with_cause_and_remedy() -> None:
    scope = Semel("memory://")._call("k", nothing_to_run, (), {}).scope
    ring = Ring(RING)
    whole = ring.seal(b"secret", scope)
    for size in range(1, len(whole)):
        with pytest.raises(CodecError, match=r"(cut short|changed|not in encrypt=).*(resolve|put it back)"):
            ring.open(whole[:size], scope)
    assert ring.open(whole, scope) == b"secret"


async def test_R15_a_record_says_which_key_it_was_sealed_with(light_lab: Lab) -> None:
    lab, store = light_lab, MemoryStore()
    await lab.do(_over(lab, store, encrypt=RING).execute("k", lab.effect("4111")))
    says = r"sealed with key '2026-a', which is not in encrypt=: put it back; resolve would overwrite it"
    other = _over(lab, store, encrypt=OTHER)
    with pytest.raises(OutcomeUnknown, match=says) as caught:
        await lab.do(other.execute("k", lab.effect()))
    assert caught.value.unreadable
    assert "Look the effect up" not in str(caught.value)  # it is not lost
    plain = _over(lab, store)
    with pytest.raises(OutcomeUnknown, match=r"sealed with key '2026-a', and here is no encrypt="):
        await lab.do(plain.execute("k", lab.effect()))
    await lab.do(plain.execute("open", lab.effect()))
    with pytest.raises(OutcomeUnknown, match=r"written without encrypt=.*resolve would overwrite it"):
        await lab.do(other.execute("open", lab.effect()))
    assert len(lab.effects) == 2


def test_the_layer_takes_a_ring_or_the_keys_of_one() -> None:
    with pytest.raises(ConfigurationError, match="at least one key"):
        Encrypt(MemoryStore(), {})
    assert Encrypt(MemoryStore(), RING)._ring.name == next(iter(RING))


def test_the_store_still_says_that_its_body_cannot_be_read() -> None:
    """Whoever decides by it must know: a replay, a resolve, a forget."""
    store, scope = MemoryStore(), Semel("memory://")._call("k", nothing_to_run, (), {}).scope
    Semel(store, encrypt=RING).execute("k", lambda: "4111")
    with pytest.raises(Sealed, match="2026-a") as caught:
        run_sync(Encrypt(store, OTHER).peek(scope))
    assert caught.value.record is not None
    assert caught.value.nonce == caught.value.record.nonce != b""
    assert str(copy.copy(caught.value)) == str(caught.value)


def test_R15_a_repair_meets_the_record_that_could_not_be_read_and_none_that_was_made_since() -> None:
    memory = MemoryStore()
    owner = Semel(memory, encrypt=RING)
    owner.execute("k", lambda: "first")

    class Meanwhile(Layer):
        async def settle(self, ends: Any) -> Any:
            owner.forget("k")
            owner.execute("k", lambda: "made anew")
            return await self.inner.settle(ends)

    person = Semel(Meanwhile(memory), encrypt=OTHER)
    with pytest.raises(ConfigurationError, match="in the meantime"):
        person.resolve("k", value="told", actor="ann")
    assert owner.execute("k", lambda: "twice").value == "made anew"
    for face in (owner, person):
        face.close()
