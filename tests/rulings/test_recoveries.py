"""What a reconcile or a person settles is kept as long as they say, and a run that goes on knows what its first caller said."""

from __future__ import annotations

from typing import Any

import pytest

from semel import UNDECIDED, ConfigurationError, Found, KeyExpired, current_run

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
