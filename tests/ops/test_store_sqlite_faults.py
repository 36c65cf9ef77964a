"""What goes wrong with an SQLite file: full, read-only, missing, damaged, replaced. Each error names the remedy."""

from __future__ import annotations

import os
import shutil
import sqlite3
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from semel.errors import CodecError, ConfigurationError, OutcomeUnknown, StoreUnavailable
from semel.model import Answer, Failure, Kind, Note, Policy, Renewal, Settle, State, Unknown, Won
from semel.runtime import run_sync
from semel.store import Query
from semel.stores.sqlite import SqliteStore
from semel.stores.sqlite import errors as sqlite_errors
from semel.stores.sqlite import file as sqlite_file
from semel.stores.sqlite import writer as sqlite_writer
from semel.stores.sqlite.schema import ensure_schema
from semel.stores.sqlite.writer import Job
from tests.ops.sqlite_lab import (
    BOTH,
    Colour,
    ask,
    end,
    finish,
    opened,
    outcome_of,
    python,
    raw,
    run,
    scope,
    win,
)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "semel.db"


@pytest.fixture
def store(path: Path) -> Iterator[SqliteStore]:
    store = opened(path, timeout=2)
    yield store
    run_sync(store.aclose())


def writing(store: SqliteStore) -> sqlite3.Connection:
    db = store._file._writing
    assert db is not None
    return db


# ------------------------------------------------------------------------------------------------------ opening


@BOTH
def test_a_missing_directory_is_named(tmp_path: Path, colour: Colour) -> None:
    store = opened(tmp_path / "nowhere" / "semel.db", colour)

    async def main() -> None:
        with pytest.raises(ConfigurationError, match=r"nowhere' does not exist; create it") as caught:
            await store.claim([ask()])
        assert isinstance(caught.value.__cause__, sqlite3.Error)
        (tmp_path / "nowhere").mkdir()
        await win(store)
        await store.aclose()

    run(colour, main)


def test_a_directory_is_not_a_file(tmp_path: Path) -> None:
    store = opened(tmp_path)
    with pytest.raises(ConfigurationError, match="it is a directory; name a file in it"):
        run_sync(store.peek(scope()))
    run_sync(store.aclose())


def test_a_file_that_is_no_database_is_left_alone(path: Path) -> None:
    path.write_text("dear diary, " * 1000)
    store = opened(path)
    with pytest.raises(ConfigurationError, match="is not an SQLite database"):
        run_sync(store.peek(scope()))
    run_sync(store.aclose())
    assert path.read_text() == "dear diary, " * 1000


RIGHTS = """
import os, sys
from semel.errors import SemelError
from semel.keys import make_scope
from semel.model import Ask
from semel.runtime import run_sync
from semel.store import Settings, open_store
from semel.stores import sqlite
if os.geteuid() == 0:
    os.seteuid(65534)  # to root nothing is forbidden
store = open_store(f"sqlite:///{sys.argv[1]}", Settings(timeout=1), "sync")
try:
    run_sync(store.claim([Ask(make_scope("semel", "acme", "op", "key"), bytes(16), 10.0, 60.0)]))
except SemelError as error:
    print(type(error).__name__, error)
run_sync(store.aclose())
if os.getuid() == 0:
    os.seteuid(0)
"""


@pytest.fixture
def open_folder() -> Iterator[Path]:
    """A folder that every user can enter, unlike pytest's own."""
    folder = Path(tempfile.mkdtemp(prefix="semel-test-"))
    folder.chmod(0o755)
    yield folder
    folder.chmod(0o755)
    shutil.rmtree(folder)


def test_a_path_without_rights_is_named(open_folder: Path) -> None:
    open_folder.chmod(0o555)
    told = outcome_of(python(RIGHTS, str(open_folder / "semel.db")))
    assert told.startswith("ConfigurationError")
    assert "may not write in" in told


def test_a_file_that_may_not_be_read_is_named(open_folder: Path) -> None:
    open_folder.chmod(0o777)
    path = open_folder / "semel.db"
    raw(path, "CREATE TABLE x (y)")
    path.chmod(0o000)
    told = outcome_of(python(RIGHTS, str(path)))
    assert told.startswith("ConfigurationError")
    assert "may not read and write it; change its owner or permissions" in told


def test_a_read_only_file_is_named(open_folder: Path) -> None:
    open_folder.chmod(0o777)
    path = open_folder / "semel.db"
    raw(path, "CREATE TABLE x (y)")
    path.chmod(0o444)
    told = outcome_of(python(RIGHTS, str(path)))
    assert told.startswith("StoreUnavailable")
    assert "is read-only for this process: give it write permission" in told


def test_a_file_system_without_a_write_ahead_log_is_refused(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # What SQLite answers on a file system without shared memory is "delete"; an open transaction makes it answer so here.
    monkeypatch.setattr(sqlite_file, "patiently", lambda db, sql, deadline: [("delete",)])
    store = opened(path)
    with pytest.raises(ConfigurationError, match="put it on a local disk"):
        run_sync(store.peek(scope()))
    run_sync(store.aclose())


# ------------------------------------------------------------------------------------------------------- writing


@BOTH
def test_a_full_disk_stops_before_the_effect_and_heals(path: Path, colour: Colour) -> None:
    store = opened(path, colour)

    async def main() -> None:
        owner = await win(store)
        pages = raw(path, "PRAGMA page_count")[0][0]
        writing(store).execute(f"PRAGMA max_page_count = {pages + 2}")
        with pytest.raises(StoreUnavailable, match=r"cannot grow.*free some space") as caught:
            await store.settle([end(owner, result=b"x" * 100_000)])
        assert isinstance(caught.value.__cause__, sqlite3.Error)
        # The store begins afresh with another connection, for which the limit is gone: space was freed.
        await finish(store, owner, result=b"x" * 100_000)
        await store.aclose()

    run(colour, main)


@BOTH
def test_one_result_too_large_for_the_disk_fails_alone(path: Path, colour: Colour) -> None:
    store = opened(path, colour)

    async def main() -> None:
        owners = [await win(store, f"key-{n}") for n in range(3)]
        pages = raw(path, "PRAGMA page_count")[0][0]
        writing(store).execute(f"PRAGMA max_page_count = {pages + 2}")
        sizes = (10, 100_000, 10)
        ends = [end(owner, result=b"x" * size) for owner, size in zip(owners, sizes, strict=True)]
        first, middle, last = await store.settle(ends)
        assert (first, last) == (Answer.OK, Answer.OK)
        assert isinstance(middle, StoreUnavailable)
        states = [(await store.peek(owner.scope))[0] for owner in owners]
        assert [record.state for record in states if record] == [State.DONE, State.RUNNING, State.DONE]
        await store.aclose()

    run(colour, main)


def test_a_bad_item_among_those_that_are_tried_alone_stays_alone(store: SqliteStore) -> None:
    owners = [run_sync(win(store, f"key-{n}")) for n in range(3)]
    writing(store).execute(
        f"PRAGMA max_page_count = {raw(Path(store._file.path), 'PRAGMA page_count')[0][0] + 2}"
    )
    ends = [end(owners[0], result=b"x" * 100_000), end(owners[1], ref="\ud800"), end(owners[2])]
    big, bad, good = run_sync(store.settle(ends))
    assert (type(big), type(bad), good) == (StoreUnavailable, CodecError, Answer.OK)


def test_a_value_beyond_sqlites_own_limit_fails_alone(store: SqliteStore) -> None:
    owners = [run_sync(win(store, f"key-{n}")) for n in range(2)]
    writing(store).setlimit(sqlite3.SQLITE_LIMIT_LENGTH, 50_000)
    bad, good = run_sync(store.settle([end(owners[0], result=b"x" * 60_000), end(owners[1])]))
    assert isinstance(bad, StoreUnavailable)
    assert "lower max_result" in str(bad)
    assert good is Answer.OK


def test_text_that_cannot_be_stored_exactly_is_refused_and_text_for_people_is_escaped(
    store: SqliteStore,
) -> None:
    bad, good = run_sync(store.claim([ask("bad", labels={"x": "\udcff"}), ask("good", labels={"x": "é"})]))
    assert isinstance(bad, CodecError)
    assert isinstance(good, Won)
    owner = run_sync(win(store))
    failure = Failure("OSError", "\udc80", "no such file '\udcff'")
    run_sync(finish(store, owner, kind=Kind.FAILED, error=failure))
    record, _ = run_sync(store.peek(owner.scope))
    assert record is not None
    assert record.error == Failure("OSError", "\\udc80", "no such file '\\udcff'")


def test_a_mistake_of_ours_is_not_called_an_outage(store: SqliteStore) -> None:
    run_sync(store.peek(scope()))

    def broken(db: sqlite3.Connection, item: object) -> object:
        return db.execute("SELEKT 1")

    store._records.renew = broken  # type: ignore[method-assign, assignment]  # replaced for this test
    with pytest.raises(sqlite3.OperationalError, match="syntax error"):
        run_sync(store.renew([Renewal(scope(), b"", 1.0, 1.0)]))
    with pytest.raises(sqlite3.OperationalError, match="syntax error"):
        run_sync(store._read(lambda db: broken(db, None), 0.0))
    good, bad = run_sync(store.renew([Renewal(scope(), b"", 1.0, 1.0)] * 2))
    assert {type(good), type(bad)} == {sqlite3.OperationalError}


@BOTH
def test_tables_that_were_dropped_are_named(path: Path, colour: Colour) -> None:
    store = opened(path, colour)

    async def main() -> None:
        owner = await win(store)
        raw(path, "DROP TABLE semel")
        for call in (store.claim([ask()]), store.settle([end(owner)]), store.scan(Query())):
            with pytest.raises(ConfigurationError, match=r"lacks a part of semel's tables.*semel schema sql"):
                await call
        await store.aclose()

    run(colour, main)


@BOTH
def test_a_deleted_file_is_not_silently_replaced_by_an_empty_one(path: Path, colour: Colour) -> None:
    store = opened(path, colour)

    async def main() -> None:
        owner = await win(store)
        path.unlink()
        for _ in range(2):
            with pytest.raises(StoreUnavailable, match="was deleted while in use: put it back"):
                await store.settle([end(owner)])
            with pytest.raises(StoreUnavailable, match="was deleted while in use"):
                await store.claim([ask("new")])
        assert not path.exists()
        await store.aclose()
        again = opened(path, colour)
        await win(again)
        await again.aclose()

    run(colour, main)


def test_a_file_put_back_is_used_again(path: Path, store: SqliteStore, tmp_path: Path) -> None:
    owner = run_sync(win(store))
    moved = path.rename(tmp_path / "aside.db")
    with pytest.raises(StoreUnavailable, match="was deleted"):
        run_sync(store.settle([end(owner)]))
    moved.rename(path)
    run_sync(finish(store, owner))


def test_a_replaced_file_is_not_written_to(path: Path, store: SqliteStore, tmp_path: Path) -> None:
    owner = run_sync(win(store))
    other = opened(tmp_path / "other.db")
    run_sync(win(other, "theirs"))
    run_sync(other.aclose())
    content = (tmp_path / "other.db").read_bytes()
    (tmp_path / "other.db").rename(path)
    for _ in range(2):
        with pytest.raises(StoreUnavailable, match="was replaced by another one while in use"):
            run_sync(store.settle([end(owner)]))
        with pytest.raises(StoreUnavailable, match="was replaced by another one while in use"):
            run_sync(store.claim([ask("new")]))
    assert path.read_bytes() == content


def test_a_deleted_log_is_not_acknowledged(path: Path, store: SqliteStore) -> None:
    run_sync(win(store, "before"))
    Path(f"{path}-wal").unlink()
    with pytest.raises(StoreUnavailable, match="never touch SQLite's files"):
        run_sync(store.claim([ask("after")]))


def test_a_damaged_file_is_named(path: Path) -> None:
    store = opened(path)
    for n in range(200):
        run_sync(finish(store, run_sync(win(store, f"key-{n}")), result=b"x" * 1000))
    run_sync(store.aclose())
    with path.open("r+b") as file:
        for page in range(2, path.stat().st_size // 4096):
            file.seek(page * 4096)
            file.write(b"\xa5" * 4096)
    store = opened(path)
    with pytest.raises(StoreUnavailable, match=r"is damaged: .*\.recover"):
        run_sync(store.claim([ask("key-1")]))
    with pytest.raises(StoreUnavailable, match="is damaged"):
        run_sync(store.scan(Query()))
    run_sync(store.aclose())


def test_a_reader_that_met_trouble_is_not_kept(store: SqliteStore) -> None:
    run_sync(win(store))
    (kept,) = store._file._idle

    def trouble(db: sqlite3.Connection) -> None:
        assert db is kept
        db.execute("SELEKT 1")

    with pytest.raises(sqlite3.OperationalError):
        store._file.read_now(trouble)
    assert store._file._idle == []


def test_every_error_of_the_driver_is_explained_or_raised_as_it_is() -> None:
    def made(code: int) -> sqlite3.Error:
        error = sqlite3.OperationalError("trouble")
        error.sqlite_errorcode = code
        return error

    for code in (
        sqlite3.SQLITE_BUSY,
        sqlite3.SQLITE_IOERR_FSYNC,
        sqlite3.SQLITE_NOMEM,
        sqlite3.SQLITE_CORRUPT,
    ):
        explained = sqlite_errors.explain(made(code), "x.db")
        assert isinstance(explained, StoreUnavailable)
        assert isinstance(explained.__cause__, sqlite3.Error)
    with pytest.raises(sqlite3.OperationalError):
        sqlite_errors.explain(made(sqlite3.SQLITE_CONSTRAINT), "x.db")


# ------------------------------------------------------------------------------------------------- damaged rows

DAMAGES = {
    "an unknown state": "state = 'dreaming'",
    "an unknown policy": "policy = 'shrug'",
    "labels that are no JSON": "labels = '{'",
    "a nonce that is text": "nonce = 'text'",
    "a count that is text": "attempts = 'many'",
    "a time that is text": "expires = 'soon'",
    "a key that is bytes": "key = x'ff'",
    "text that is not UTF-8": "marker = CAST(x'ff' AS TEXT)",
}


@pytest.mark.parametrize("damage", DAMAGES.values(), ids=DAMAGES.keys())
def test_R15_a_row_that_cannot_be_read_is_unknown_until_somebody_decides(
    path: Path, store: SqliteStore, damage: str
) -> None:
    owner = run_sync(win(store))
    run_sync(finish(store, owner, result=b"x"))
    run_sync(win(store, "other"))
    raw(path, f"UPDATE semel SET {damage} WHERE key = 'key'")
    assert run_sync(store.claim([ask()])) == [Unknown(None, Policy.HOLD, unreadable=True)]
    with pytest.raises(OutcomeUnknown, match=r"resolve\(key, …\) or forget\(key\)") as caught:
        run_sync(store.peek(scope()))
    assert caught.value.unreadable
    for verb in (
        store.settle([end(owner)]),
        store.renew([Renewal(scope(), owner.nonce, 1.0, 1.0)]),
    ):
        assert isinstance(run_sync(verb)[0], OutcomeUnknown)
    with pytest.raises(OutcomeUnknown):
        run_sync(store.note(Note(scope(), owner.nonce, b"x")))
    store._skew = 1e6
    assert run_sync(store.purge(10)) == 1, "time takes what can be read, and only that"
    refused = end(owner, Kind.UNKNOWN, new_nonce=bytes(16), actor="ada")
    assert run_sync(store.settle([refused])) == [Answer.REFUSED]
    assert run_sync(store.claim([ask()])) == [Unknown(None, Policy.HOLD, unreadable=True)]
    word = end(
        owner, nonce=b"", new_nonce=os.urandom(16), repair=True, result=b"found", actor="ada", reason="looked"
    )
    assert run_sync(store.settle([word])) == [Answer.OK]
    record, _ = run_sync(store.peek(scope()))
    assert record is not None
    assert (record.state, record.result, record.scope) == (State.DONE, b"found", scope())
    assert [event.actor for event in run_sync(store.scan(Query(history=scope()))).events] == ["ada"]


@pytest.mark.parametrize("damage", DAMAGES.values(), ids=DAMAGES.keys())
def test_R15_a_row_that_cannot_be_read_may_be_forgotten(path: Path, store: SqliteStore, damage: str) -> None:
    run_sync(win(store))
    raw(path, f"UPDATE semel SET {damage}")
    assert run_sync(store.scan(Query())).records == []
    assert run_sync(store.settle([Settle(scope(), b"", Kind.FORGOTTEN, 60.0)])) == [Answer.OK]
    run_sync(win(store))


def test_a_row_damaged_between_look_and_write_is_unknown_too(path: Path, store: SqliteStore) -> None:
    run_sync(win(store))
    raw(path, "UPDATE semel SET state = 'dreaming'")
    job = Job(store._records.claim, [ask()], time.monotonic() + 5)
    assert store._file.writer.commit(job) == [Unknown(None, Policy.HOLD, unreadable=True)]


# ------------------------------------------------------------------------------------------------- transactions lost


def test_a_word_that_ends_the_whole_transaction_fails_alone_all_the_same(
    path: Path, store: SqliteStore
) -> None:
    owners = [run_sync(win(store, f"key-{n}")) for n in range(3)]
    for owner in owners:
        run_sync(finish(store, owner, kind=Kind.UNKNOWN))
    raw(
        path,
        "CREATE TRIGGER no BEFORE INSERT ON semel_audit WHEN new.actor = 'eve' BEGIN SELECT RAISE(ROLLBACK, 'no'); END",
    )
    actors = ("ada", "eve", "bob")
    words = [
        end(o, nonce=b"", new_nonce=os.urandom(16), actor=a) for o, a in zip(owners, actors, strict=True)
    ]
    first, middle, last = run_sync(store.settle(words))
    assert (first, type(middle), last) == (Answer.OK, sqlite3.IntegrityError, Answer.OK)
    states = raw(path, "SELECT state FROM semel ORDER BY key")
    assert states == [("done",), ("unknown",), ("done",)]


class Clock:
    """The time as the writer reads it: it stands still but for what a step takes."""

    def __init__(self, now: float) -> None:
        self.now = now

    def monotonic(self) -> float:
        return self.now


def test_items_that_are_tried_alone_share_the_deadline(
    store: SqliteStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    run_sync(store.peek(scope()))

    clock = Clock(time.monotonic())
    monkeypatch.setattr(sqlite_writer, "time", clock)

    def slow(db: sqlite3.Connection, item: int) -> int:
        clock.now += 5.0
        db.execute("SELEKT 1")
        return item

    answers = store._file.writer.commit(Job(slow, [1, 2], clock.now + 8.0))
    assert [type(answer) for answer in answers] == [sqlite3.OperationalError, StoreUnavailable]


def test_who_looks_for_the_tables_waits_for_a_file_that_is_locked_for_a_moment(path: Path) -> None:
    """Readers too: while its log begins, or ends with the last of its users."""
    with closing(sqlite3.connect(path, isolation_level=None, check_same_thread=False)) as other:
        other.execute("CREATE TABLE orders (id)")
        other.execute("BEGIN EXCLUSIVE")  # without a log it locks readers out
        leaving = threading.Timer(0.2, other.execute, ("COMMIT",))
        leaving.start()
        with closing(sqlite3.connect(path, timeout=0, isolation_level=None)) as db:
            ensure_schema(db, "semel", create=True, deadline=time.monotonic() + 20)
            assert db.execute("SELECT max(version) FROM semel_schema").fetchall() == [(1,)]
        leaving.join()
