"""`semel ls | show | explain | watch | stats | resolve | release | forget | purge`, on every kind of store."""

from __future__ import annotations

import hashlib
import itertools
import json
import re
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Iterator
from math import inf
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
import redis
from typer.testing import CliRunner

from semel import (
    UNDECIDED,
    ConfigurationError,
    Found,
    InProgress,
    OutcomeUnknown,
    Release,
    Semel,
    SemelError,
    current_run,
)
from semel.cli import keys
from semel.cli.commands import app
from semel.cli.meanings import explained
from semel.cli.places import Place
from semel.cli.tables import say
from semel.hooks import HookEvent
from semel.model import Policy

STORES = ["sqlite", "redis", "postgres", "mariadb"]


class Desk:
    """A store with keys of every kind, and the command line at it."""

    def __init__(self, url: str) -> None:
        self.url = url
        self.tenant = f"t{uuid.uuid4().hex[:8]}"
        self.once = Semel(
            url, tenant=self.tenant, operation="pay", timeout=20
        )  # a busy machine is no broken store

    def run(self, *words: str, code: int = 0) -> str:
        done = CliRunner().invoke(app, list(words))
        if isinstance(done.exception, SemelError):
            raise done.exception
        assert done.exit_code == code, done.output
        return done.output

    def about(self, command: str, key: str, *more: str, code: int = 0) -> str:
        where = ["--tenant", self.tenant, "--operation", "pay"]
        return self.run(command, self.url, key, *where, *more, code=code)

    def listed(self, *more: str) -> dict[str, str]:
        found = json.loads(self.run("ls", self.url, "--tenant", self.tenant, "--json", *more))
        return {each["key"]: each["state"] for each in found}


@pytest.fixture(params=STORES)
def desk(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Desk]:
    if request.param == "sqlite":
        url = f"sqlite:///{tmp_path}/semel.db"
    else:
        server = request.getfixturevalue(f"{request.param}_server")
        url = server.url if request.param == "redis" else server.database()
    made = Desk(url)
    made.once.execute("done-1", lambda: {"paid": 5})
    failing: dict[str, dict[str, Any]] = {"lost-1": {"on_unknown": "hold"}, "bad-1": {"on_error": "replay"}}
    for key, options in failing.items():
        with pytest.raises(RuntimeError):
            made.once.execute(key, _fails, **options)
    yield made
    made.once.close()


def _fails() -> Any:
    raise RuntimeError("no answer from the bank")


def test_what_needs_attention_is_listed_and_counted(desk: Desk) -> None:
    assert desk.listed() == {"lost-1": "unknown", "bad-1": "failed"}
    assert desk.listed("--state", "unknown") == {"lost-1": "unknown"}
    assert desk.listed("--operation", "other") == {}
    page = desk.run("ls", desk.url, "--tenant", desk.tenant)
    assert "lost-1" in page
    assert "RuntimeError: no answer from the bank" in page
    counted = json.loads(desk.run("stats", desk.url, "--tenant", desk.tenant, "--json"))
    assert [(each["operation"], each["state"], each["keys"]) for each in counted] == [
        ("pay", "failed", 1),
        ("pay", "unknown", 1),
    ]
    assert "unknown" in desk.run("stats", desk.url, "--tenant", desk.tenant)


@pytest.mark.parametrize("desk", ["sqlite"], indirect=True)
def test_a_lease_that_ends_while_keys_are_counted_is_counted_once(
    desk: Desk, monkeypatch: pytest.MonkeyPatch
) -> None:
    with desk.once.claim("run-1", lease=30) as claim:
        ticks = itertools.count(time.time(), 40)
        monkeypatch.setattr(keys, "time", SimpleNamespace(time=lambda: next(ticks)))
        counted = json.loads(desk.run("stats", desk.url, "--tenant", desk.tenant, "--json"))
        claim.complete(None)
    assert [(each["state"], each["keys"]) for each in counted] == [
        ("failed", 1),
        ("running", 1),
        ("unknown", 1),
    ]


def test_the_list_says_when_there_is_more(desk: Desk) -> None:
    said = CliRunner().invoke(app, ["ls", desk.url, "--tenant", desk.tenant, "--limit", "1"])
    assert "the first 1: --limit shows more" in said.output
    assert desk.run("ls", desk.url, "--tenant", "nobody") == "nothing needs attention\n"


def test_a_key_is_shown_with_its_value_and_its_history(desk: Desk) -> None:
    assert "{'paid': 5}" in desk.about("show", "done-1")
    data = json.loads(desk.about("show", "lost-1", "--json"))
    assert (data["record"]["state"], data["record"]["attempts"], data["history"]) == ("unknown", 1, [])
    assert data["record"]["created"].endswith("+00:00")
    missing = CliRunner().invoke(app, ["show", desk.url, "nothing"])
    assert (missing.exit_code, "no record of 'nothing'" in missing.output) == (1, True)
    assert json.loads(desk.run("show", desk.url, "nothing", "--json", code=1)) == {
        "record": None,
        "history": [],
    }


def test_a_person_decides(desk: Desk) -> None:
    words = ["--actor", "ann", "--reason", "it is on the bank's list"]
    assert desk.about("resolve", "lost-1", "--value", '{"paid": 7}', *words) == "lost-1: done\n"
    assert desk.once.execute("lost-1", _fails).value == {"paid": 7}
    assert "by ann: it is on the bank's list" in desk.about("show", "lost-1")
    assert desk.about("release", "bad-1") == "bad-1: released\n"
    assert desk.once.execute("bad-1", lambda: "again").value == "again"
    assert desk.about("forget", "bad-1") == "bad-1: forgotten\n"
    assert desk.about("forget", "never", code=1) == "never: there is no record\n"
    assert desk.once.execute("bad-1", lambda: "anew").value == "anew"
    assert desk.listed() == {}


def test_a_decision_is_kept_as_long_as_the_program_would(desk: Desk) -> None:
    desk.about("resolve", "lost-1", "--value", "1", "--retention", "2592000", "--tombstone", "7776000")
    desk.about("resolve", "bad-1", "--error", "no", "--retention", "inf")
    kept = {key: desk.once.peek(key) for key in ("lost-1", "bad-1")}
    lost, bad = kept["lost-1"], kept["bad-1"]
    assert lost is not None
    assert lost.settled is not None
    assert lost.expires == pytest.approx(lost.settled + 30 * 86_400, abs=0.01)
    assert lost.tombstone == pytest.approx(lost.expires + 90 * 86_400, abs=0.01)
    assert bad is not None
    assert bad.expires == inf
    with pytest.raises(ConfigurationError, match="retention must be at least 0"):
        desk.about("resolve", "lost-1", "--value", "1", "--retention", "-1")


def test_a_release_keeps_finished_steps_as_long_as_the_program_would(desk: Desk) -> None:
    def stepped() -> None:
        current_run().step("reserve", lambda: "reserved", on_unknown="retry")
        raise RuntimeError("no answer from the bank")

    with pytest.raises(RuntimeError):
        desk.once.execute("lost-2", stepped, on_unknown="hold")
    desk.about("release", "lost-2", "--retention", "2592000")
    record = desk.once.peek("lost-2")
    assert record is not None
    assert record.expires == pytest.approx(record.noted + 30 * 86_400, abs=0.01)


@pytest.mark.parametrize("desk", ["sqlite"], indirect=True)
def test_a_decision_needs_one_word(desk: Desk) -> None:
    for words in ([], ["--release", "--value", "1"], ["--value", "not json"]):
        with pytest.raises(ConfigurationError, match="--value"):
            desk.about("resolve", "lost-1", *words)
    with pytest.raises(ConfigurationError, match="is no state of a record: states are running, done"):
        desk.listed("--state", "stuck")
    assert desk.about("resolve", "lost-1", "--error", "the bank says no") == "lost-1: failed\n"


@pytest.mark.parametrize("desk", ["sqlite"], indirect=True)
@pytest.mark.parametrize(
    ("key", "said"),
    [
        ("done-1", "gets that outcome; nothing runs"),
        ("lost-1", "If it did not: semel release"),
        ("bad-1", "To let it run again: semel release"),
        ("new", "The next caller runs it"),
    ],
)
def test_a_state_is_explained(desk: Desk, key: str, said: str) -> None:
    assert said in desk.about("explain", key)


@pytest.mark.parametrize("desk", ["sqlite"], indirect=True)
def test_a_run_is_explained_by_its_lease_and_policy(desk: Desk) -> None:
    with desk.once.claim("run-1") as claim:
        assert "A worker has it" in desk.about("explain", "run-1")
        assert desk.listed()["run-1"] == "running"
        held = desk.once.peek("run-1")
        claim.complete(None)
    assert held is not None
    place = Place(desk.url, "semel", "semel", "run-1")
    said = {
        policy: explained(msgspec.structs.replace(held, lease_until=1.0, policy=policy), place)
        for policy in Policy
    }
    assert "takes it over and runs it again" in said[Policy.RETRY]
    assert "asks its probe" in said[Policy.PROBE]
    assert "callers get OutcomeUnknown" in said[Policy.HOLD]


@pytest.mark.parametrize("desk", ["sqlite"], indirect=True)
def test_who_comes_next_is_explained_as_it_will_be(desk: Desk) -> None:
    with pytest.raises(RuntimeError):
        desk.once.execute("late-1", _fails, on_error=lambda error: Release(after=600))
    with pytest.raises(InProgress):
        desk.once.execute("late-1", _fails)
    said = desk.about("explain", "late-1")
    assert "free in 10.0 min" in said
    assert "The next caller runs it" not in said
    assert "not_before" in desk.about("show", "late-1")

    with pytest.raises(RuntimeError):
        desk.once.execute("probed-1", _fails, on_unknown=lambda: UNDECIDED)
    said = desk.about("explain", "probed-1")
    assert "asks its probe" in said
    assert "nothing runs" not in said
    assert desk.once.execute("probed-1", _fails, on_unknown=lambda: Found("paid")).value == "paid"

    desk.about("release", "lost-1")
    assert "The function failed" not in desk.about("explain", "lost-1"), "nobody knows that"


def test_a_run_is_followed_to_its_end(desk: Desk, monkeypatch: pytest.MonkeyPatch) -> None:
    begun, go = threading.Event(), threading.Event()

    def said(data: object) -> None:
        say(data)
        go.set()  # the run ends after it was seen running, however slow the machine is

    def slow() -> str:
        begun.set()
        go.wait(30)
        return "x"

    worker = threading.Thread(target=lambda: desk.once.execute("slow-1", slow))
    worker.start()
    begun.wait(30)
    monkeypatch.setattr(keys, "say", said)
    lines = desk.about("watch", "slow-1", "--every", "0.02", "--json").splitlines()
    worker.join()
    assert [json.loads(line)["state"] for line in lines] == ["running", "done"]
    assert desk.about("watch", "never", "--timeout", "0.05", code=1) == "no record yet\n"


def test_what_expired_is_removed(desk: Desk) -> None:
    desk.once.execute("short-1", lambda: 1, retention=0.05)
    time.sleep(0.1)  # its retention, by the store's clock
    said = desk.run("purge", desk.url)
    assert said.endswith(" removed\n")
    assert desk.once.peek("short-1") is None


@pytest.mark.parametrize("purged", [False, True])
def test_R19_a_tombstone_is_shown_with_its_own_end_and_no_time_that_is_none(desk: Desk, purged: bool) -> None:
    desk.once.execute("short-1", lambda: 1, retention=0.05, tombstone=900)
    time.sleep(0.1)  # its retention, by the store's clock
    if purged:
        desk.run("purge", desk.url)
    said = desk.about("show", "short-1")
    assert re.search(r"^state +expired$", said, re.MULTILINE)
    assert re.search(r"^tombstone +20\d\d-", said, re.MULTILINE)
    assert "1970-" not in said
    data = json.loads(desk.about("show", "short-1", "--json"))["record"]
    assert "1970-" not in str(data)
    assert data["tombstone"] > data["settled"]


@pytest.mark.parametrize("desk", ["sqlite"], indirect=True)
def test_R13_what_a_person_decided_is_explained_with_what_is_not_refused(desk: Desk) -> None:
    desk.about("resolve", "lost-1", "--error", "the bank says no")
    said = desk.about("explain", "lost-1")
    assert "semel forget" in said
    assert "semel release" not in said
    assert said.count("semel resolve") == said.count("--correct") == 2
    with pytest.raises(ConfigurationError):
        desk.about("release", "lost-1")
    desk.about("forget", "lost-1")


@pytest.mark.parametrize("desk", ["sqlite"], indirect=True)
def test_what_a_record_says_cannot_move_the_cursor(desk: Desk) -> None:
    def fails() -> None:
        raise RuntimeError("\x1b[2J gone")

    with pytest.raises(RuntimeError):
        desk.once.execute("evil-1", fails, on_error="replay")
    for said in (desk.run("ls", desk.url), desk.about("show", "evil-1"), desk.about("watch", "evil-1")):
        assert "\x1b" not in said
        assert r"\x1b[2J gone" in said


def test_programs_that_share_a_store_do_not_see_each_others_keys(desk: Desk) -> None:
    with Semel(desk.url, tenant=desk.tenant, operation="pay", prefix="other") as other:
        with pytest.raises(RuntimeError):
            other.execute("mine", _fails, on_unknown="hold")
        assert desk.listed("--prefix", "other") == {"mine": "unknown"}
        assert set(desk.listed()) == {"lost-1", "bad-1"}
        other.recovery("pay", probe=lambda record: Found("here"), tenant=desk.tenant)
        assert (other.reconcile(limit=1).settled, desk.listed("--prefix", "other")) == (1, {})
    assert set(desk.listed()) == {"lost-1", "bad-1"}


def test_R26_what_nobody_can_do_anything_about_stands_in_nobodys_way(desk: Desk) -> None:
    for number in range(8):
        with pytest.raises(RuntimeError):
            desk.once.execute(f"stuck-{number}", _fails, on_unknown="hold", operation="other")
    with pytest.raises(RuntimeError):
        desk.once.execute("mine", _fails, on_unknown="hold", operation="probed")
    desk.once.recovery("probed", probe=lambda record: Found("here"), tenant=desk.tenant)
    report = desk.once.reconcile(limit=2)
    assert (report.settled, len(report.left)) == (1, 2)
    assert desk.once.execute("mine", _fails, operation="probed").value == "here"


WITHOUT_SQLALCHEMY = """
import sys
sys.modules["sqlalchemy"] = None
from semel.cli import main
sys.argv = ["semel", *sys.argv[1:]]
main()
"""


@pytest.mark.parametrize(
    ("words", "code", "said"),
    [
        (["--version"], 0, "0."),
        (["doctor", "memory://"], 0, "memory"),
        (["outbox", "stats", "sqlite:///x.db"], 2, 'pip install "semel[messaging]"'),
    ],
)
def test_without_sqlalchemy_only_messaging_is_missing(
    words: list[str], code: int, said: str, tmp_path: Path
) -> None:
    command = [sys.executable, "-c", WITHOUT_SQLALCHEMY, *words]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert (done.returncode, said in done.stdout + done.stderr) == (code, True), done.stderr


def test_a_masked_key_is_named_by_its_scope(desk: Desk) -> None:
    with Semel(desk.url, tenant=desk.tenant, operation="pay", readable="masked") as masked:
        with pytest.raises(RuntimeError):
            masked.execute("a-very-secret-key", _fails, on_unknown="hold")
        found = json.loads(desk.run("ls", desk.url, "--tenant", desk.tenant, "--json"))
        (scope,) = [each["scope"] for each in found if "…" in each["key"]]
        assert "the function raised" in desk.run("explain", desk.url, scope, "--scope").lower()
        assert desk.run("resolve", desk.url, scope, "--scope", "--value", "7") == f"{scope}: done\n"
        assert masked.execute("a-very-secret-key", _fails).value == 7
        assert [event.kind for event in masked.history("a-very-secret-key")] == ["done"]
        record = masked.peek("a-very-secret-key")
        assert record is not None
        assert (record.scope, record.resolved) == (masked.peek(record.scope or "").scope, True)  # type: ignore[union-attr]  # the record that was just found
        assert masked.forget(record.scope or "") is True
    with pytest.raises(ConfigurationError, match="64 hexadecimal digits"):
        desk.run("show", desk.url, "lost-1", "--scope")


def test_the_digits_that_messages_tell_find_the_record_of_a_namespace_too(desk: Desk) -> None:
    heard: list[Any] = []
    with Semel(desk.url, tenant=desk.tenant, namespace="shop", hooks=[heard.append], timeout=20) as once:
        with pytest.raises(RuntimeError):
            once.execute("k", _fails, on_unknown="hold")
        with pytest.raises(OutcomeUnknown) as told:
            once.execute("k", _fails)
        (digits,) = re.findall(r"\[([0-9a-f]{8})\]", str(told.value))
        (scope,) = {event.scope.hex for event in heard if isinstance(event, HookEvent)}
        (record,) = once.find()
        assert record.scope is not None
        assert record.scope.hex == scope
        assert scope.startswith(digits)
        for name in (digits, scope):
            shown = json.loads(desk.run("show", desk.url, name, "--scope", "--json"))["record"]
            assert (shown["scope"], shown["state"]) == (scope, "unknown")
        assert desk.run("resolve", desk.url, digits, "--scope", "--value", "7") == f"{scope}: done\n"
        assert once.execute("k", _fails).value == 7


def test_what_a_store_cannot_list_is_refused_not_empty(desk: Desk) -> None:
    if desk.url.startswith("redis"):
        with pytest.raises(ConfigurationError, match="this store keeps no list of done records"):
            desk.listed("--state", "done")
    else:
        assert desk.listed("--state", "done") == {"done-1": "done"}
    if desk.url.startswith("sqlite"):
        assert desk.run("ls", desk.url, "--state", "expired") == "no such records\n"


def _has_a_ref() -> Any:
    current_run().set_ref("ord_7")
    raise RuntimeError("no answer from the bank")


def test_a_ref_leads_to_its_key_also_after_a_decision(desk: Desk) -> None:
    is_redis = desk.url.startswith("redis")
    indexed: dict[str, Any] = {"index": {"ref"}} if is_redis else {}
    with Semel(desk.url, tenant=desk.tenant, operation="pay", timeout=20, **indexed) as once:
        with pytest.raises(RuntimeError):
            once.execute("ref-1", _has_a_ref, on_unknown="hold")
        assert desk.listed("--ref", "ord_7") == {"ref-1": "unknown"}
        desk.about("resolve", "ref-1", "--value", "5", "--retention", "1s")
        assert desk.listed("--ref", "ord_7") == {"ref-1": "done"}
        assert desk.run("ls", desk.url, "--ref", "ord_8").startswith("no such records")
    if is_redis:
        assert "only those that a program with index={'ref'}" in desk.run("ls", desk.url, "--ref", "ord_8")
        with redis.Redis.from_url(desk.url) as client:
            entries = client.keys(f"*:i:{hashlib.sha1(b'ord_7', usedforsecurity=False).hexdigest()}")
            assert all(client.pttl(each) != -1 for each in entries), "an entry that would outlive its record"


def test_the_digits_of_a_message_name_a_key_that_needs_attention(desk: Desk) -> None:
    with pytest.raises(OutcomeUnknown) as caught:
        desk.once.execute("lost-1", _fails, on_unknown="hold")
    digits = str(caught.value).partition("[")[2].partition("]")[0]
    assert len(digits) == 8
    assert "no answer from the bank" in desk.run("show", desk.url, digits, "--scope")
    assert "the function raised" in desk.run("explain", desk.url, digits.upper(), "--scope").lower()
    redis = desk.url.startswith("redis")
    none = "no record that needs attention .* all 64 digits only" if redis else "no record begins with 0{8}"
    with pytest.raises(ConfigurationError, match=none):
        desk.run("show", desk.url, "0" * 8, "--scope")
    with pytest.raises(ConfigurationError, match="the first 8 are enough for a key that needs attention"):
        desk.run("show", desk.url, digits[:7], "--scope")


class Paid(msgspec.Struct):
    cents: int


def _pays() -> Paid:
    return Paid(5)


def test_a_value_that_was_wrong_is_corrected(desk: Desk) -> None:
    desk.about("resolve", "lost-1", "--value", '{"cents": "five"}')
    with pytest.raises(OutcomeUnknown, match=r"a person resolved.*resolve\(key, value=…, result_type=…\)"):
        desk.once.execute("lost-1", _pays)
    with pytest.raises(ConfigurationError, match=r"is done, as a person said.* once.*add --correct"):
        desk.about("resolve", "lost-1", "--value", '{"cents": 5}')
    assert desk.about("resolve", "lost-1", "--value", '{"cents": 5}', "--correct") == "lost-1: done\n"
    assert desk.once.execute("lost-1", _pays).value == Paid(5)
    assert [event.kind for event in desk.once.history("lost-1")] == ["done", "done"]
    with pytest.raises(ConfigurationError, match="say value=…, or error=…"):
        desk.about("resolve", "lost-1", "--release", "--correct")
    for key in ("done-1", "bad-1"):
        with pytest.raises(ConfigurationError, match="holds no outcome that a person gave"):
            desk.about("resolve", key, "--value", "1", "--correct")
