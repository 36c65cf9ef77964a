"""R21-R26: keys, fingerprints, values, steps and ids."""

from __future__ import annotations

import copy
import dataclasses
import datetime as dt
import decimal
import socket
import sqlite3
from contextlib import closing
from pathlib import Path
from typing import Any, TypedDict

import msgspec
import pydantic
import pytest

from semel import (
    CodecError,
    ConfigurationError,
    Found,
    InvalidKey,
    KeyMismatch,
    OutcomeUnknown,
    Semel,
    current_run,
    fingerprint,
    parse_id,
)

from .conftest import Lab
from .test_failure import _stop_heart
from .tools import lapsed, owned


@dataclasses.dataclass
class Point:
    x: int


class Row(msgspec.Struct):
    x: int


class Model(pydantic.BaseModel):
    x: int


class Typed(TypedDict):
    x: int


def make_point() -> Point:
    return Point(1)


def make_row() -> list[Row]:
    return [Row(1)]


def make_model() -> Model | None:
    return Model(x=1)


def make_typed() -> Typed:
    return {"x": 1}


def make_nothing() -> None:
    return None


def make_bytes() -> bytes:
    return b"\x00\x01"


def make_socket() -> socket.socket:
    raise AssertionError("must never run")


async def test_R21_keys_are_checked_and_the_message_names_the_part(light_lab: Lab) -> None:
    once = light_lab.face()
    for wrong in ("", "x" * 256, "a\nb", "a\ud800", 7, None, b"k"):
        with pytest.raises(InvalidKey, match="key"):
            await light_lab.do(once.execute(wrong, light_lab.effect()))
        with pytest.raises(InvalidKey, match="operation"):
            await light_lab.do(once.execute("k", light_lab.effect(), operation=wrong))
    assert light_lab.effects == []


async def test_R21_tenant_operation_and_prefix_keep_scopes_apart(lab: Lab) -> None:
    once = lab.face()
    options: list[dict[str, Any]] = [
        {},
        {"operation": "b"},
        {"tenant": lab.tenant + "2"},
        {"operation": "a:b"},
    ]
    for index, each in enumerate(options):
        assert (await lab.do(once.execute("k", lab.effect(index), **each))).value == index
    assert (await lab.do(lab.face(prefix="other").execute("k", lab.effect("p")))).value == "p"
    assert (await lab.do(once.execute("K", lab.effect("case")))).value == "case"


async def test_R21_readable_says_what_is_kept_of_the_key(lab: Lab) -> None:
    for readable, kept in (("full", "customer-4711-order-9"), ("masked", None), ("none", "")):
        once = lab.face(readable=readable, prefix=readable)
        await lab.do(once.execute("customer-4711-order-9", lab.effect()))
        key = (await lab.do(once.peek("customer-4711-order-9"))).scope.key
        assert key == kept or (kept is None and "4711" not in key and key)


async def test_R22_fingerprints_conflict_also_while_running(lab: Lab) -> None:
    once = lab.face()
    async with owned(lab, once, "k", request={"amount": 1}) as claim:
        with pytest.raises(KeyMismatch):
            await lab.do(lab.face().execute("k", lab.effect(), request={"amount": 2}, wait=5))
        await lab.do(claim.complete("x"))
    with pytest.raises(KeyMismatch):
        await lab.do(once.execute("k", lab.effect(), request={"amount": 2}))
    assert (await lab.do(once.execute("k", lab.effect(), request={"amount": 1.0}))).replayed
    assert (await lab.do(once.execute("k", lab.effect()))).replayed  # no fingerprint never conflicts


async def test_R22_a_supplied_fingerprint_is_64_hex_digits_in_either_case(lab: Lab) -> None:
    once = lab.face()
    print_ = fingerprint({"a": 1})
    assert (await lab.do(once.execute("k", lab.effect(), fingerprint=print_.upper()))).value == "done"
    assert (await lab.do(once.execute("k", lab.effect(), request={"a": 1}))).replayed
    for wrong in ("abc", "g" * 64, 5):
        with pytest.raises(ConfigurationError):
            await lab.do(once.execute("k", lab.effect(), fingerprint=wrong))


async def test_R22_nan_bombs_and_missing_fingerprints_are_refused(light_lab: Lab) -> None:
    once = light_lab.face()
    bomb: list[Any] = []
    for _ in range(5000):
        bomb = [bomb]
    for wrong in ({"x": float("nan")}, {"x": float("inf")}, bomb, {"x": object()}):
        with pytest.raises(CodecError):
            await light_lab.do(once.execute("k", light_lab.effect(), request=wrong))
    with pytest.raises(ConfigurationError, match="required"):
        await light_lab.do(once.execute("k", light_lab.effect(), fingerprints="required"))
    assert light_lab.effects == []


async def test_R22_chosen_fields_count(lab: Lab) -> None:
    once = lab.face()
    await lab.do(once.execute("k", lab.effect(), request={"a": 1, "at": 5}, fields=("a",)))
    assert (await lab.do(once.execute("k", lab.effect(), request={"a": 1, "at": 6}, fields=("a",)))).replayed
    with pytest.raises(KeyMismatch):
        await lab.do(once.execute("k", lab.effect(), request={"a": 2, "at": 5}, fields=("a",)))


@pytest.mark.parametrize("make", [make_point, make_row, make_model, make_typed, make_nothing, make_bytes])
async def test_R23_a_replay_has_the_type_of_the_annotation(lab: Lab, make: Any) -> None:
    once = lab.face()
    first = await lab.do(once.execute("k", lab.fn(make)))
    again = await lab.do(once.execute("k", lab.fn(make)))
    assert again.value == first.value
    assert type(again.value) is type(first.value)


async def test_R23_what_the_annotation_shows_to_be_unstorable_is_refused_before_the_effect(
    light_lab: Lab,
) -> None:
    once = light_lab.face()
    with pytest.raises(CodecError):
        await light_lab.do(once.execute("k", light_lab.fn(make_socket)))
    assert await light_lab.do(once.peek("k")) is None


async def test_R23_over_max_result_the_caller_gets_its_value_and_the_record_a_marker_and_ref(
    lab: Lab,
) -> None:
    once = lab.face(max_result=100)

    def big() -> str:
        lab.effects.append("big")
        current_run().set_ref("ord_9")
        return "x" * 1000

    assert (await lab.do(once.execute("k", lab.fn(big)))).value == "x" * 1000
    again = await lab.do(once.execute("k", lab.fn(big)))
    assert (again.replayed, again.ref, lab.effects) == (True, "ord_9", ["big"])
    with pytest.raises(CodecError, match="ord_9") as told:
        _ = again.value
    assert "set_ref" not in str(told.value), "it has one"
    assert (await lab.do(once.execute("bare", lab.fn(lambda: "x" * 1000)))).value
    with pytest.raises(CodecError, match="set_ref"):
        _ = (await lab.do(once.execute("bare", lab.fn(lambda: "x" * 1000)))).value


async def test_R23_whoever_made_it_happen_is_told_that_it_did(light_lab: Lab) -> None:
    lab, once = light_lab, light_lab.face(on_unknown="hold")
    says = r"key .* \[[0-9a-f]{8}\] of .*ran and is recorded as done, and will not run again; its result was not kept: result is a type"
    for words in (says, "its result could not be encoded when it happened"):
        with pytest.raises(CodecError, match=words) as caught:
            await lab.do(once.execute("k", lab.effect(socket.socket)))
        assert caught.value.recorded
        assert copy.copy(caught.value).recorded  # as it is after a way to another process
    with pytest.raises(CodecError) as early:
        await lab.do(once.execute("k2", lab.fn(make_socket)))
    assert not early.value.recorded
    with pytest.raises(SystemExit):
        await lab.do(once.execute("k3", lab.raising(SystemExit())))
    with pytest.raises(
        CodecError, match=r"what the probe found for .* stays unknown: result is a type"
    ) as lost:
        await lab.do(once.execute("k3", lab.effect(), on_unknown=lambda: Found(socket.socket)))
    assert not lost.value.recorded
    assert len(lab.effects) == 2


def test_R27_within_a_transaction_it_is_recorded_when_that_commits(tmp_path: Path) -> None:
    path = tmp_path / "semel.db"
    with Semel(f"sqlite:///{path}") as once, closing(sqlite3.connect(path)) as db:
        once.create()
        with pytest.raises(
            CodecError, match="ran and is recorded as done if this transaction commits"
        ) as told:
            once.within(db).execute("k", lambda: socket.socket)
        assert told.value.recorded
        db.commit()
        assert once.peek("k").state == "done"  # type: ignore[union-attr]  # it is there


async def test_R23_results_may_be_compressed(lab: Lab) -> None:
    once = lab.face(compress_over=100)
    await lab.do(once.execute("k", lab.effect("x" * 10_000)))
    assert len((await lab.do(once.peek("k"))).result) < 1000
    assert (await lab.do(once.execute("k", lab.effect()))).value == "x" * 10_000


async def test_R24_downstream_keys_survive_attempts_and_rotation(lab: Lab) -> None:
    old, new = {"a": b"0" * 32}, {"b": b"1" * 32, "a": b"0" * 32}
    keys: list[str] = []

    def work(fail: bool) -> None:
        keys.append(current_run().downstream_key("stripe"))
        if fail:
            raise OSError("down")

    with pytest.raises(OSError, match="down"):
        await lab.do(lab.face(secret=old).execute("k", lab.fn(work), True))
    await lab.do(lab.face(secret=new).execute("k", lab.fn(work), False))
    await lab.do(lab.face(secret=new).execute("k2", lab.fn(work), False))
    await lab.do(lab.face().execute("k3", lab.fn(work), False))
    assert keys[0] == keys[1]
    assert len(set(keys)) == 3


async def test_R25_a_new_id_is_minted_once_per_scope_and_survives_failure_and_takeover(lab: Lab) -> None:
    minted: list[str] = []

    def plain(fail: bool) -> str:
        minted.append(current_run().new_id("ord"))
        if fail:
            raise OSError("later")
        return minted[-1]

    async def coloured(fail: bool) -> str:
        # The run is one object: its type is that of a plain function, and it is awaited in a coroutine all the same.
        minted.append(await current_run().new_id("ord"))
        if fail:
            raise OSError("later")
        return minted[-1]

    work = plain if lab.colour == "sync" else coloured
    once = lab.face()
    with pytest.raises(OSError, match="later"):
        await lab.do(once.execute("k", work, True))
    outcome = await lab.do(once.execute("k", work, False))
    assert minted[0] == minted[1] == outcome.value == outcome.ref
    again = await lab.do(once.execute("k", work, False, ref_type="ord"))
    assert again.ref == minted[0]
    assert parse_id(again.ref, "ord").uuid.version == 7
    with pytest.raises(KeyMismatch):
        await lab.do(once.execute("k", work, False, ref_type="inv"))


async def test_R26_steps_are_done_once_and_remembered_over_a_takeover(lab: Lab) -> None:
    dead, heir = lab.face(lease=0.05), lab.face()
    done: list[str] = []

    def one_step(name: str) -> dict[str, str]:
        done.append(name)
        return {"step": name}

    step = lab.fn(one_step)
    claim = dead.claim("k")
    await lab.do(claim.__enter__() if lab.colour == "sync" else claim.__aenter__())
    assert await lab.do(claim.run.step("one", step, "one")) == {"step": "one"}
    assert await lab.do(claim.run.step("one", step, "one")) == {"step": "one"}  # one name, one step
    _stop_heart(dead, lab)
    await lapsed(lab, heir, "k")

    def plain() -> Any:
        run = current_run()
        return [run.step("one", step, "one"), run.step("two", step, "two")]

    async def coloured() -> Any:
        run = current_run()
        return [await run.step("one", step, "one"), await run.step("two", step, "two")]

    outcome = await lab.do(heir.execute("k", plain if lab.colour == "sync" else coloured))
    assert outcome.value == [{"step": "one"}, {"step": "two"}]
    assert outcome.attempt == 2
    assert done == ["one", "two"]
    record = await lab.do(heir.peek("k"))
    from semel import steps

    kept = steps.decode(record.steps)
    assert set(kept) == {"one", "two"}
    assert all(each.value == b"" for each in kept.values())


async def test_R26_only_request_is_compared(lab: Lab) -> None:
    once = lab.face()
    async with owned(lab, once, "k") as claim:
        step = lab.fn(lambda: 1)
        await lab.do(claim.run.step("a", step, request={"x": 1}))
        with pytest.raises(KeyMismatch):
            await lab.do(claim.run.step("a", step, request={"x": 2}))
        assert await lab.do(claim.run.step("a", step)) == 1
        await lab.do(claim.complete(None))


async def test_R26_a_started_step_under_hold_is_unknown_and_a_probe_may_find_it(lab: Lab) -> None:
    dead = lab.face(lease=0.05)

    class Crash(BaseException):
        pass

    def crash() -> None:
        raise Crash

    for key in ("held", "probed"):
        claim = dead.claim(key)
        await lab.do(claim.__enter__() if lab.colour == "sync" else claim.__aenter__())
        with pytest.raises(Crash):
            await lab.do(claim.run.step("charge", lab.fn(crash), on_unknown="hold"))
    _stop_heart(dead, lab)
    await lapsed(lab, dead, "held")
    await lapsed(lab, dead, "probed")
    calls: list[Any] = []

    def charge() -> str:
        calls.append(1)
        return "charged"

    step = lab.fn(charge)

    def work(policy: Any) -> Any:
        def plain() -> Any:
            return current_run().step("charge", step, on_unknown=policy)

        async def coloured() -> Any:
            return await current_run().step("charge", step, on_unknown=policy)

        return plain if lab.colour == "sync" else coloured

    once = lab.face()
    with pytest.raises(OutcomeUnknown):
        await lab.do(once.execute("held", work("hold")))
    assert (await lab.do(once.peek("held"))).state == "unknown"
    found = lab.fn(lambda: Found("found it"))
    assert (await lab.do(once.execute("probed", work(found)))).value == "found it"
    assert calls == []


async def test_R26_the_number_and_size_of_steps_are_bounded(light_lab: Lab) -> None:
    once = light_lab.face()
    step = light_lab.fn(lambda: "x" * 300_000)
    async with owned(light_lab, once, "k") as claim:
        for number in range(3):
            await light_lab.do(claim.run.step(f"s{number}", step))
        with pytest.raises(ConfigurationError, match="bytes"):
            await light_lab.do(claim.run.step("s4", step))
        await light_lab.do(claim.complete(None))
    small = light_lab.fn(lambda: 1)
    async with owned(light_lab, once, "k2") as claim:
        for number in range(256):
            await light_lab.do(claim.run.step(f"s{number}", small))
        with pytest.raises(ConfigurationError, match="256"):
            await light_lab.do(claim.run.step("one too many", small))
        await light_lab.do(claim.complete(None))


async def test_R26_reconcile_probes_resumes_and_reports_what_is_left(lab: Lab) -> None:
    dead = lab.face(lease=0.05)
    for key, operation, policy in (
        ("a", "probed", lambda: None),
        ("b", "resumed", "retry"),
        ("c", "stuck", "hold"),
    ):
        claim = dead.claim(key, operation=operation, on_unknown=policy)
        await lab.do(claim.__enter__() if lab.colour == "sync" else claim.__aenter__())
    _stop_heart(dead, lab)
    for key, operation in (("a", "probed"), ("b", "resumed"), ("c", "stuck")):
        await lapsed(lab, dead, key, operation=operation)
    once = lab.face()
    once.recovery(
        "probed", probe=lab.fn(lambda record: Found(f"found {record.scope.key}")), tenant=lab.tenant
    )
    once.recovery("resumed", resume=lab.fn(lambda record: f"resumed {record.scope.key}"), tenant=lab.tenant)
    report = await lab.do(once.reconcile())
    assert (report.settled, report.resumed) == (1, 1)
    assert "c" in report.left
    assert (await lab.do(once.execute("a", lab.effect(), operation="probed"))).value == "found a"
    assert (await lab.do(once.execute("b", lab.effect(), operation="resumed"))).value == "resumed b"


@dataclasses.dataclass
class Told:
    order: str
    at: dt.datetime
    cents: int = 0


class Modelled(pydantic.BaseModel):
    order: str
    cents: decimal.Decimal


def _as_told() -> Told: ...  # type: ignore[empty-body]  # only its annotation counts
def _as_model() -> Modelled: ...  # type: ignore[empty-body]  # only its annotation counts
def _as_pair() -> tuple[int, str]: ...  # type: ignore[empty-body]  # only its annotation counts
def _as_bytes() -> bytes: ...  # type: ignore[empty-body]  # only its annotation counts
def _as_maybe() -> Told | None: ...


@pytest.mark.parametrize(
    ("fn", "value", "expected"),
    [
        (
            _as_told,
            {"order": "7", "at": "2026-01-02T03:04:05Z"},
            Told("7", dt.datetime(2026, 1, 2, 3, 4, 5, tzinfo=dt.UTC)),
        ),
        (_as_model, {"order": "7", "cents": "1.50"}, Modelled(order="7", cents=decimal.Decimal("1.50"))),
        (_as_pair, [1, "a"], (1, "a")),
        (_as_bytes, "aGk=", b"hi"),
        (_as_maybe, None, None),
    ],
    ids=["dataclass", "pydantic", "tuple", "bytes", "optional"],
)
async def test_R2_what_a_person_resolved_has_the_functions_type(
    light_lab: Lab, fn: Any, value: Any, expected: Any
) -> None:
    once = light_lab.face(on_unknown="hold")
    with pytest.raises(SystemExit):
        await light_lab.do(once.execute("k", light_lab.raising(SystemExit())))
    await light_lab.do(once.resolve("k", value=value, actor="ann"))
    outcome = await light_lab.do(once.execute("k", light_lab.fn(fn)))
    assert (outcome.value, type(outcome.value), outcome.replayed) == (expected, type(expected), True)
    untyped = await light_lab.do(once.execute("k", light_lab.fn(lambda: 1)))
    assert untyped.value == value


async def test_R2_what_cannot_be_the_functions_type_is_never_another_one(light_lab: Lab) -> None:
    once = light_lab.face(on_unknown="hold")
    with pytest.raises(SystemExit):
        await light_lab.do(once.execute("k", light_lab.raising(SystemExit())))
    with pytest.raises(CodecError) as refused:
        await light_lab.do(once.resolve("k", value=Told("7", dt.datetime.now(dt.UTC))))
    assert not hasattr(refused.value, "__notes__"), "nothing was recorded"
    await light_lab.do(once.resolve("k", value={"cents": 5}, actor="ann"))
    with pytest.raises(OutcomeUnknown, match="a person resolved the key with"):
        await light_lab.do(once.execute("k", light_lab.fn(_as_told)))
