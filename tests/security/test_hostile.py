"""Text that means something to SQL, Lua, the Redis protocol, LIKE, printf or a shell is text here, in every store."""

from __future__ import annotations

import uuid
from collections.abc import Mapping
from itertools import count
from pathlib import Path

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from semel import ConfigurationError, InvalidKey, PreviousFailure, Semel, SemelError, current_run
from semel.calls import clean
from semel.runtime import run_sync
from semel.store import Query
from semel.typed import Place

from .conftest import told, url_of

INJECTIONS = (
    "'; DROP TABLE semel; --",
    "' OR '1'='1",
    '"; DELETE FROM semel; --',
    "\\'; SELECT pg_sleep(9); --",
    "1); ATTACH DATABASE '/tmp/x' AS x; --",
    "/*!50000 SELECT sleep(9) */",
    "%s%n%(key)s{0}{key!r}${HOME}$1:key?",
    "]] .. redis.call('FLUSHALL') .. [[",
    "return redis.call('FLUSHALL')",
    "$6 FLUSHALL *1",
    "%",
    "_",
    "a%_b\\%",
    "*",
    "semel:{0}:*",
    "{tag}{0}}{",
    "../../etc/passwd",
    "<script>alert(1)</script>",
    "\u202enoitpecxe",
    "ｕｎｉｏｎ　ｓｅｌｅｃｔ",
    "İstanbul ıI ßSS \u212a",
)
# What no name may hold: it ends a line of a protocol, a C string, or a UTF-8 sequence.
UNPRINTABLE = (
    "\x00",
    "\r\nFLUSHALL\r\n",
    "a\r\n$3\r\nbad",
    "a\nb",
    "\x1b[2J",
    "\ud800",
    "\x7f",
    "a\u2028b",
    "\x85",
)

_text = st.text(max_size=40)
_piece = st.one_of(st.sampled_from(INJECTIONS), st.sampled_from(UNPRINTABLE), _text)
hostile = st.lists(_piece, min_size=1, max_size=3).map("".join)
_numbers = count()


def few(examples: int) -> settings:
    """Fixed examples, and a few: every one of them goes to a real server."""
    return settings(
        max_examples=examples, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
    )


def is_name(text: str) -> bool:
    return text.isprintable() and 0 < len(text) <= 255


def table_of(once: Semel, note: str) -> None:
    """The store is whole: what was there before is there still."""
    assert once.execute("canary", told("alive"), operation="canary").value == "alive", note
    assert once.execute("canary", told("dead"), operation="canary").replayed, note


@few(25)
@given(tenant=hostile, operation=hostile, key=hostile)
@example(tenant=INJECTIONS[0], operation=INJECTIONS[8], key=INJECTIONS[9])
@example(tenant="%", operation="_", key="*")
def test_names_are_refused_at_once_or_name_just_one_thing(
    once: Semel, tenant: str, operation: str, key: str
) -> None:
    where = Place(tenant=tenant, operation=operation)
    ran: list[str] = []

    def effect() -> str:
        ran.append(key)
        return key

    if not all(map(is_name, (tenant, operation, key))):
        with pytest.raises(InvalidKey):
            once.execute(key, effect, **where)
        with pytest.raises(InvalidKey):
            once.peek(key, **where)
        assert not ran
        return
    fresh = f"{tenant[:200]}{next(_numbers)}"  # another tenant in every example
    where["tenant"] = fresh
    assert once.execute(key, effect, **where).value == key
    assert once.execute(key, effect, **where).replayed
    assert ran == [key]
    record = once.peek(key, **where)
    assert record is not None
    assert record.scope is not None
    assert (record.scope.tenant, record.scope.operation, record.scope.key) == (fresh, operation, key)
    assert once.forget(key, actor="ada", **where)
    assert once.peek(key, **where) is None
    table_of(once, key)


@few(20)
@given(
    labels=st.dictionaries(
        hostile.map(lambda text: text[:64]), hostile.map(lambda text: text[:255]), max_size=3
    )
)
@example(labels={"'": "\x00", "b": "\r\n"})
@example(labels={"a": "\ud800"})
def test_labels_come_back_or_are_refused_before_the_effect(once: Semel, labels: Mapping[str, str]) -> None:
    key, ran = f"labels-{next(_numbers)}", []
    try:
        once.execute(key, lambda: ran.append(1), labels=labels)
    except ConfigurationError:
        refused = True
    else:
        refused = False
    assert refused == any(not name or clean(name + text) != name + text for name, text in labels.items())
    assert bool(ran) is not refused
    if refused:
        assert once.peek(key) is None
        return
    record = once.peek(key)
    assert record is not None
    assert dict(record.labels or {}) == dict(labels)


@few(20)
@given(message=hostile, code=st.one_of(st.none(), hostile))
@example(message="\x00\ud800\r\n", code="\x00")
@example(message="ü" * 5_000, code=None)
def test_a_failure_is_kept_whatever_its_text_says(once: Semel, message: str, code: str | None) -> None:
    """The effect may have happened: text that a store cannot hold must not cost the record."""
    key = f"failure-{next(_numbers)}"

    class Failed(Exception):
        pass

    def fail() -> None:
        error = Failed(message)
        if code is not None:
            error.code = code  # type: ignore[attr-defined]  # as drivers do
        raise error

    with pytest.raises(Failed):
        once.execute(key, fail, on_error="replay")
    with pytest.raises(PreviousFailure) as again:
        once.execute(key, fail, on_error="replay")
    assert again.value.type_name.endswith("Failed")
    table_of(once, message)


@few(20)
@given(actor=hostile, reason=hostile)
@example(actor="\x00", reason="\ud800")
@example(actor="a" * 300, reason="r" * 5_000)
def test_words_of_people_are_kept(once: Semel, actor: str, reason: str) -> None:
    key = f"word-{next(_numbers)}"
    once.execute(key, told(1))
    once.forget(key, actor=actor, reason=reason)
    (event,) = once.history(key)
    assert (event.actor, event.reason) == (clean(actor) or "anonymous", clean(reason))


@few(20)
@given(value=st.one_of(hostile, st.binary(max_size=60)), ref=hostile)
@example(value="\x00\ud800\r\n", ref="'; --")
def test_results_and_refs_come_back_as_they_were(once: Semel, value: str | bytes, ref: str) -> None:
    key = f"result-{next(_numbers)}"

    def effect() -> str | bytes:
        if is_name(ref):
            current_run().set_ref(ref)
        else:
            with pytest.raises(InvalidKey):
                current_run().set_ref(ref)
        return value

    first = once.execute(key, effect)
    again = once.execute(key, effect)
    assert again.replayed
    assert (again.value, again.ref) == (value, first.ref)
    assert type(again.value) is type(value)


@few(20)
@given(name=hostile, value=hostile)
def test_steps_are_named_by_any_text_or_refused(once: Semel, name: str, value: str) -> None:
    key, ran = f"step-{next(_numbers)}", []

    def step() -> str:
        ran.append(1)
        return value

    def effect() -> str | None:
        run = current_run()
        if not is_name(name) or name.startswith("id:"):
            with pytest.raises(SemelError):
                run.step(name, step)
            return None
        return str(run.step(name, step) == run.step(name, step) == value)

    assert once.execute(key, effect).value in ("True", None)
    assert len(ran) <= 1


TABLES = ("semel; DROP TABLE x", 'a"b', "a`b", "a b", "", "x" * 200, "é", "1a", "a.b.c")


@pytest.mark.parametrize("store", ["sqlite", "postgres", "mysql"])
def test_names_of_tables_come_from_an_allow_list(
    request: pytest.FixtureRequest, store: str, tmp_path: Path
) -> None:
    url = url_of(request, store, tmp_path)
    for table in TABLES:
        with pytest.raises(ConfigurationError):
            Semel(url, table=table, timeout=20).create()


def test_no_wildcard_of_a_tenant_finds_anothers_records(once: Semel) -> None:
    mine = f"tenant-{uuid.uuid4().hex}"
    with pytest.raises(ZeroDivisionError):
        once.execute("k", lambda: 1 // 0, tenant=mine, on_error="hold")
    store = once._engine().store
    assert len(run_sync(store.scan(Query(tenant=mine))).records) == 1
    for mark in ("%", "_", "*", "?", "[a-z]*", "tenant-%", "tenant_%", "\\", mine.upper(), f"{mine} "):
        assert not run_sync(store.scan(Query(tenant=mark))).records, mark
        assert not run_sync(store.scan(Query(tenant=mine, operation=mark))).records, mark
