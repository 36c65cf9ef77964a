"""What is left of the guarantee table on a store, as its settings are."""

from __future__ import annotations

from pathlib import Path

import pytest

from semel import Semel
from semel.guarantees import FAULTS, TABLE, Facts, Mode, Promise, grade
from semel.stores.mysql.server import facts_of


def test_a_sound_store_keeps_the_table_as_it_is_published() -> None:
    rows = grade(Facts("any")).rows
    assert rows == {mode: dict(zip(FAULTS, row, strict=True)) for mode, row in TABLE.items()}


def test_what_once_rests_on_beside_the_store_is_said_where_it_is_promised() -> None:
    assert set(grade(Facts("any")).conditions) == {Mode.KEYED, Mode.PROBE}
    assert set(grade(Facts("any", coherent=False)).conditions) == {Mode.KEYED}, "a probe promises less there"
    assert grade(Facts("any"), enabled=False).conditions == {}


def test_galera_is_at_least_once_and_not_may_be_lost_never_doubled() -> None:
    found = grade(facts_of({"wsrep_on": "ON", "wsrep_provider": "/usr/lib/libgalera_smm.so"}, "mariadb"))
    tx = found.rows[Mode.TX]
    assert (tx["crash"], tx["zombie"]) == (Promise.AT_LEAST_ONCE, Promise.AT_LEAST_ONCE)
    assert tx["loss"] == Promise.MAY_BE_EITHER
    assert set(found.rows[Mode.HOLD].values()) == {Promise.MAY_REPEAT}
    assert found.rows[Mode.PROBE]["crash"] == Promise.AT_LEAST_ONCE
    assert set(found.rows[Mode.KEYED].values()) == {Promise.EXACTLY_ONCE}
    assert not found.exactly_once


def test_a_store_that_only_loses_never_doubles() -> None:
    tx = grade(Facts("mariadb", durable_writes=False)).rows[Mode.TX]
    assert tx["crash"] == Promise.EXACTLY_ONCE
    assert tx["loss"] == Promise.MAY_BE_LOST


def test_a_store_that_drops_records_may_double_what_it_keeps_of_the_effect() -> None:
    found = grade(Facts("redis", evicts=True))
    lost = {mode: row["loss"] for mode, row in found.rows.items()}
    assert lost[Mode.TX] == lost[Mode.TWO_PHASE] == Promise.MAY_BE_EITHER
    assert lost[Mode.HOLD] == Promise.MAY_REPEAT
    assert lost[Mode.KEYED] == Promise.EXACTLY_ONCE
    assert found.rows[Mode.TX]["crash"] == found.rows[Mode.TX]["zombie"] == Promise.EXACTLY_ONCE
    assert "loss" in found.exposed
    assert not found.exactly_once


@pytest.mark.parametrize("coherent", [True, False])
def test_nothing_is_promised_where_nothing_is_protected(coherent: bool) -> None:
    found = grade(Facts("any", coherent=coherent), enabled=False)
    assert {promise for row in found.rows.values() for promise in row.values()} == {Promise.NOTHING}


def test_sqlite_on_a_network_file_system_does_not_promise_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("semel.stores.sqlite.facts._file_system", lambda _: "nfs4")
    with Semel(f"sqlite:///{tmp_path}/semel.db") as once:
        guarantee = once.guarantee()
    assert guarantee.rows["tx"]["crash"] != "exactly once"
    assert guarantee.rows["keyed"]["crash"] == "exactly once"
