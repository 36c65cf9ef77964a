"""What a reconcile or a person settles is kept as long as they say, and a run that goes on knows what its first caller said."""

from __future__ import annotations

import re
import time
from typing import Any

import pytest

from semel import NOT_FOUND, UNDECIDED, ConfigurationError, Found, KeyExpired, current_run

from .conftest import Lab
from .test_failure import _stop_heart
from .tools import let_pass

LONG, LONGER = 30 * 86_400, 90 * 86_400


async def _lose(lab: Lab, once: Any, key: str, **options: Any) -> None:
    with pytest.raises(SystemExit):
        await lab.do(once.execute(key, lab.raising(SystemExit()), **options))
    lab.effects.clear()


async def _is_kept_long(lab: Lab, once: Any, key: str, **where: Any) -> None:
    record = await lab.do(once.peek(key, **where))
    assert record.expires == pytest.approx(record.settled + LONG, abs=0.01)
    assert record.tombstone == pytest.approx(record.settled + LONG + LONGER, abs=0.01)
    let_pass(once, LONG - 100)
    assert (await lab.do(once.execute(key, lab.effect("twice"), **where))).replayed
    let_pass(once, 200)
    with pytest.raises(KeyExpired):
        await lab.do(once.execute(key, lab.effect("twice"), **where))
    assert lab.effects == []


async def test_R18_what_a_reconcile_settles_is_kept_as_its_recovery_says(lab: Lab) -> None:
    once = lab.face(retention=60)
    await _lose(lab, once, "k", operation="charge", on_unknown=lab.fn(lambda: UNDECIDED))
    probe = lab.fn(lambda _: Found("charged"))
    once.recovery("charge", probe=probe, tenant=lab.tenant, retention=LONG, tombstone=LONGER)
    assert (await lab.do(once.reconcile())).settled == 1
    await _is_kept_long(lab, once, "k", operation="charge")


async def test_R18_what_a_reconcile_resumes_is_kept_as_its_recovery_says(lab: Lab) -> None:
    dead, once = lab.face(lease=30, retention=60), lab.face(retention=60)
    claim = dead.claim("k", operation="charge")
    await lab.do(claim.__enter__() if lab.colour == "sync" else claim.__aenter__())
    _stop_heart(dead, lab)
    let_pass(once, 31)
    once.recovery(
        "charge", resume=lab.fn(lambda _: "charged"), tenant=lab.tenant, retention=LONG, tombstone=LONGER
    )
    assert (await lab.do(once.reconcile())).resumed == 1
    await _is_kept_long(lab, once, "k", operation="charge")


async def test_R10_a_run_is_resumed_under_the_policy_it_was_claimed_with_whatever_the_face_s_is(
    lab: Lab,
) -> None:
    dead, once = lab.face(lease=30), lab.face(on_unknown="hold")
    claim = dead.claim("k", operation="mail")
    await lab.do(claim.__enter__() if lab.colour == "sync" else claim.__aenter__())
    _stop_heart(dead, lab)
    let_pass(once, 31)
    once.recovery("mail", resume=lab.fn(lambda _: "sent"), tenant=lab.tenant)
    assert (await lab.do(once.reconcile())).resumed == 1
    assert (await lab.do(once.execute("k", lab.effect(), operation="mail"))).value == "sent"
    assert lab.effects == []


async def test_R10_a_run_that_was_claimed_under_hold_is_not_resumed(lab: Lab) -> None:
    once = lab.face()
    await _lose(lab, once, "k", operation="charge", on_unknown="hold")
    once.recovery("charge", resume=lab.effect(), tenant=lab.tenant)
    assert "k" in (await lab.do(once.reconcile())).left  # other labs' of the same store, too
    assert (lab.effects, (await lab.do(once.peek("k", operation="charge"))).state) == ([], "unknown")


async def test_R9_a_resumed_run_that_fails_ends_as_its_recovery_says(light_lab: Lab) -> None:
    lab = light_lab
    dead, once = lab.face(lease=30), lab.face()
    claim = dead.claim("k", operation="charge")
    await lab.do(claim.__enter__() if lab.colour == "sync" else claim.__aenter__())
    _stop_heart(dead, lab)
    let_pass(once, 31)

    def fails(_: Any) -> None:
        raise ValueError("the card is gone")

    once.recovery("charge", resume=lab.fn(fails), on_error="replay")
    assert (await lab.do(once.reconcile())).failed == 1
    assert (await lab.do(once.peek("k", operation="charge"))).state == "failed"


async def test_R18_what_a_person_resolves_is_kept_as_he_says(lab: Lab) -> None:
    once = lab.face(retention=60)
    await _lose(lab, once, "k", on_unknown="hold")
    await lab.do(once.resolve("k", value="charged", actor="ann", retention=LONG, tombstone=LONGER))
    await _is_kept_long(lab, once, "k")


async def test_a_recovery_refuses_options_that_it_does_not_know(light_lab: Lab) -> None:
    once = light_lab.face()
    with pytest.raises(ConfigurationError, match=r"'wait'.*a recovery takes .*retention"):
        once.recovery("charge", probe=lambda _: UNDECIDED, wait=5)
    with pytest.raises(ConfigurationError, match="retention"):
        once.recovery("charge", probe=lambda _: UNDECIDED, retention=-1)


async def test_R7_a_resumed_run_has_the_labels_of_its_record(lab: Lab) -> None:
    dead, once = lab.face(lease=30, operation="charge"), lab.face(operation="charge")
    claim = dead.claim("k", labels={"order": "7"})
    await lab.do(claim.__enter__() if lab.colour == "sync" else claim.__aenter__())
    _stop_heart(dead, lab)
    let_pass(once, 31)
    seen: list[Any] = []
    once.recovery(
        "charge", resume=lab.fn(lambda _: seen.append(dict(current_run().labels))), tenant=lab.tenant
    )
    assert (await lab.do(once.reconcile())).resumed == 1
    assert seen == [{"order": "7"}]


@pytest.mark.parametrize("readable", ["masked", "none"])
async def test_R24_a_probe_of_a_masked_record_gets_no_other_downstream_key(lab: Lab, readable: str) -> None:
    told: list[Any] = []
    once = lab.face(readable=readable, operation="charge", secret="s" * 32, hooks=[told.append])
    await _lose(lab, once, "customer-4711-order-99", on_unknown=lab.fn(lambda: UNDECIDED))
    keys: list[str] = []

    def probe(_: Any) -> object:
        keys.append(current_run().key)
        current_run().downstream_key("stripe")
        return NOT_FOUND

    once.recovery("charge", probe=lab.fn(probe), tenant=lab.tenant, masked=True)
    report = await lab.do(once.reconcile())
    assert (report.settled, report.failed) == (0, 1)
    assert "…" in keys[0]
    errors = [getattr(event, "error", None) for event in told]
    (error,) = [each for each in errors if isinstance(each, ConfigurationError)]
    assert re.search(r"masked.*set_ref.*label", str(error))
    assert (await lab.do(once.peek("customer-4711-order-99"))).state == "unknown", "nothing was freed"
    await lab.do(once.forget("customer-4711-order-99"))


async def test_R24_the_probe_of_a_record_with_its_whole_key_has_the_runs_downstream_key(
    light_lab: Lab,
) -> None:
    lab = light_lab
    once = lab.face(operation="charge", secret="s" * 32)
    keys: list[str] = []

    def lost() -> None:
        keys.append(current_run().downstream_key("stripe"))
        raise SystemExit

    with pytest.raises(SystemExit):
        await lab.do(once.execute("k", lab.fn(lost), on_unknown=lab.fn(lambda: UNDECIDED)))

    def probe(_: Any) -> object:
        keys.append(current_run().downstream_key("stripe"))
        return Found("charged")

    once.recovery("charge", probe=lab.fn(probe), masked=True)
    assert (await lab.do(once.reconcile())).settled == 1
    assert keys[0] == keys[1]


async def test_R26_a_reconcile_does_not_wait_for_who_runs_a_key_whatever_its_face_does(lab: Lab) -> None:
    dead, other = lab.face(lease=30, operation="op"), lab.face(lease=60, operation="op")
    once = lab.face(operation="op", wait=20)
    claim = dead.claim("seen-to")
    await lab.do(claim.__enter__() if lab.colour == "sync" else claim.__aenter__())
    _stop_heart(dead, lab)
    for face in (once, other):
        let_pass(face, 31)
    scan = once._engine().store.scan

    async def scanned(query: Any) -> Any:
        """What is lost, as it was before another reconciler took it over."""
        page = await scan(query)
        taken = other.claim("seen-to")
        await lab.do(taken.__enter__() if lab.colour == "sync" else taken.__aenter__())
        return page

    once._engine().store.scan = scanned
    once.recovery("op", resume=lab.fn(lambda _: "twice"), tenant=lab.tenant)
    began = time.monotonic()
    report = await lab.do(once.reconcile())
    assert report.resumed == 0
    assert "seen-to" not in report.left, "it is seen to: no person need look"
    assert time.monotonic() - began < 15
