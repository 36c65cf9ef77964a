"""What the commands about keys say: what is true of the record, and commands that do what they say."""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from typer.testing import CliRunner

from semel import CodecError, Semel, current_run
from semel.cli import main, tables
from semel.cli.commands import app
from semel.cli.places import Place
from semel.cli.records import trail
from semel.model import Event, Kind, State
from tests.command_line import refused

PLACE = ["--tenant", "acme", "--operation", "charge"]


class Declined(Exception):
    code = "card_declined"


def _fails() -> Any:
    raise Declined("no funds")


class Shop:
    """A program with a tenant and an operation, and the command line at its file."""

    def __init__(self, folder: Path) -> None:
        self.url = f"sqlite:///{folder}/semel.db"
        self.once = Semel(self.url, tenant="acme", operation="charge", max_result=50, on_unknown="hold")

    def lost(self, key: str, **options: Any) -> None:
        with pytest.raises(Declined):
            self.once.execute(key, _fails, **options)

    def killed(self, key: str, policy: str = "retry") -> None:
        """A run whose worker is gone, and whose lease is over."""
        code = (
            "import os, sys; from semel import Semel\n"
            "once = Semel(sys.argv[1], tenant='acme', operation='charge', lease=0.05, on_unknown=sys.argv[3])\n"
            "once.execute(sys.argv[2], lambda: os._exit(0))"
        )
        subprocess.run([sys.executable, "-c", code, self.url, key, policy], check=True)
        time.sleep(0.06)  # its lease, by the store's clock

    def say(self, command: str, key: str, *more: str, code: int = 0) -> str:
        return self.run(command, self.url, key, *PLACE, *more, code=code)

    def run(self, *words: str, code: int = 0) -> str:
        done = CliRunner().invoke(app, list(words))
        assert done.exit_code == code, done.output
        return done.output

    def advised(self, said: str, verb: str) -> list[list[str]]:
        """The commands of this kind in an explanation, as a shell takes them."""
        found = [line[line.index("semel ") :] for line in said.splitlines() if f"semel {verb} " in line]
        return [shlex.split(line)[1:] for line in found]


@pytest.fixture
def shop(tmp_path: Path) -> Any:
    made = Shop(tmp_path)
    yield made
    made.once.close()


@pytest.fixture
def refuses(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Callable[..., str]:
    def run(*words: str) -> str:
        monkeypatch.setattr("sys.argv", ["semel", *words])
        return refused(main, capsys)

    return run


def test_what_a_person_said_is_not_told_of_the_function(shop: Shop) -> None:
    said = {}
    for key, word in {
        "done": ["--value", "1"],
        "failed": ["--error", "no"],
        "released": ["--release"],
    }.items():
        shop.lost(key)
        shop.say("resolve", key, *word)
        said[key] = shop.say("explain", key)
        assert "The function" not in said[key]
        assert "decided once, and stays so" not in said[key]
        (shown,) = shop.advised(said[key], "show")
        assert " by " in shop.run(*shown)
    assert (
        "A person said that it happened, and gave this outcome. Callers get it; nothing runs." in said["done"]
    )
    assert "A person said that it failed. Callers get PreviousFailure; nothing runs." in said["failed"]
    assert "A person said that it did not happen: the next caller runs it." in said["released"]
    for key in ("done", "failed"):
        correct, _ = shop.advised(said[key], "resolve")
        correct[correct.index("JSON")] = "7"
        shop.run(*correct)
        assert shop.once.execute(key, _fails).value == 7
        (forget,) = shop.advised(said[key], "forget")
        shop.run(*forget)


def test_R23_a_result_that_was_not_kept_is_explained_as_callers_meet_it(shop: Shop) -> None:
    shop.once.execute("large", lambda: "x" * 1_000)
    with pytest.raises(CodecError):
        shop.once.execute("odd", lambda: object())
    said = shop.say("explain", "large")
    assert (
        "result was not kept (too large). Callers get the ref, and CodecError at .value; nothing runs."
        in said
    )
    outcome = shop.once.execute("large", _fails)
    with pytest.raises(CodecError):
        _ = outcome.value
    said = shop.say("explain", "odd")
    assert (
        "could not be encoded and was not kept. Callers get CodecError, which tells the ref; nothing runs."
        in said
    )
    with pytest.raises(CodecError, match="ref=None"):
        shop.once.execute("odd", _fails)


def test_what_is_advised_of_a_sealed_record_is_not_refused(shop: Shop) -> None:
    with Semel(
        shop.url, tenant="acme", operation="charge", on_unknown="hold", encrypt={"a": os.urandom(32)}
    ) as sealed:

        def stepped() -> None:
            current_run().step("reserve", lambda: 1)
            _fails()

        for key in ("bare", "stepped", "told", "failed"):
            with pytest.raises(Declined):
                sealed.execute(key, stepped if key == "stepped" else _fails)
        sealed.resolve("told", value=1)
        sealed.resolve("failed", error="no")
        with pytest.raises(Declined):
            sealed.execute("kept", _fails, on_error="replay")
        kinds = {}
        for key in ("bare", "stepped", "told", "failed", "kept"):
            said = shop.say("explain", key)
            assert "belongs to a program with encrypt=:" in said
            assert "--value" not in said
            kinds[key] = [verb for verb in ("resolve", "release", "forget") if shop.advised(said, verb)]
            for verb in dict.fromkeys((kinds[key][0], kinds[key][-1])):  # what was resolved is not released
                for words in shop.advised(said, verb):
                    shop.run(*words)
        assert kinds == {
            "bare": ["resolve", "release", "forget"],
            "stepped": ["resolve", "forget"],
            "told": ["forget"],
            "failed": ["resolve", "forget"],
            "kept": ["resolve", "release", "forget"],
        }


def test_a_lost_run_says_what_reconcile_needs(shop: Shop) -> None:
    shop.killed("k")
    said = shop.say("explain", "k")
    assert (
        "Nothing has to be done: the next caller does it. once.reconcile() does so without a caller, where "
        "once.recovery(operation, resume=…) is registered." in said
    )
    assert shop.once.reconcile().resumed == 0
    shop.once.recovery("charge", resume=lambda record: "done", tenant="acme")
    assert shop.once.reconcile().resumed == 1


def test_a_forgotten_key_still_has_its_trail(shop: Shop) -> None:
    shop.lost("k")
    shop.say("forget", "k", "--actor", "ann", "--reason", "test data")
    said = shop.say("show", "k", code=1)
    assert "no record of 'k'" in said
    assert "forgotten by ann: test data" in said
    done = CliRunner().invoke(app, ["show", shop.url, "k", *PLACE])
    assert "no record" in done.stderr
    assert done.stdout.endswith("forgotten by ann: test data\n")


def test_a_decision_about_the_first_digits_tells_all_of_them_and_the_record_is_still_found(
    shop: Shop,
) -> None:
    shop.lost("k")
    (record,) = shop.once.find()
    assert record.scope is not None
    digits = record.scope.hex[:8]
    assert shop.run("release", shop.url, digits, "--scope") == f"{record.scope.hex}: released\n"
    assert "released" in shop.run("show", shop.url, digits, "--scope")
    said = shop.run("explain", shop.url, digits, "--scope")
    assert shop.advised(said, "show") == [["show", shop.url, record.scope.hex, "--scope"]]
    assert shop.run("forget", shop.url, digits, "--scope") == f"{record.scope.hex}: forgotten\n"


@pytest.mark.parametrize(
    ("place", "words"),
    [
        (Place("redis://u:pass@h/0", "semel", "semel", "k"), ["redis://u:***@h/0", "k"]),
        (Place("u", "semel", "semel", "it's"), ["u", "it's"]),
        (Place("u", "jobs", "shop", "k"), ["u", "k", "--table", "jobs", "--prefix", "shop"]),
        (
            Place("u", "semel", "semel", "k", tenant="default", operation="a b"),
            ["u", "k", "--operation", "a b"],
        ),
        (Place("u", "semel", "semel", "-k", tenant="t"), ["u", "--tenant", "t", "--", "-k"]),
    ],
)
def test_an_advised_command_is_whole_and_can_be_pasted(place: Place, words: list[str]) -> None:
    assert shlex.split(place.command("release")) == ["semel", "release", *words]


def test_a_key_like_an_option_is_advised_so_that_it_is_taken(shop: Shop) -> None:
    shop.lost("-k")
    said = shop.run("explain", shop.url, *PLACE, "--", "-k")
    (release,) = shop.advised(said, "release")
    assert shop.run(*release) == "-k: released\n"


@pytest.mark.parametrize("readable", ["full", "masked"])
def test_a_forgotten_tenant_and_operation_are_told(shop: Shop, readable: Any) -> None:
    with Semel(shop.url, tenant="acme", operation="pay", readable=readable) as once:
        once.execute("a-key-that-may-be-masked", lambda: 1)
        once.execute("over", lambda: 1, retention=0.01)
    time.sleep(0.02)  # its retention, by the store's clock
    for command, code in (("show", 1), ("explain", 0)):
        said = shop.run(command, shop.url, "a-key-that-may-be-masked", code=code)
        assert "the key is there under tenant 'acme', operation 'pay'" in said
        said = shop.run(command, shop.url, "over", code=code)
        assert "the key is there" not in said
        assert "--tenant" not in said, "all were looked through"
    assert json.loads(shop.run("show", shop.url, "over", "--json", code=1)) == {"record": None, "history": []}


@pytest.mark.services
def test_where_not_all_can_be_listed_it_is_asked_for(redis_server: Any) -> None:
    with Semel(redis_server.url, tenant="acme", operation="charge") as once:
        once.execute("redis-done", lambda: 1)
        with pytest.raises(Declined):
            once.execute("redis-lost", _fails, on_unknown="hold")
    said = CliRunner().invoke(app, ["show", redis_server.url, "redis-done"])
    assert "give --tenant and --operation" in said.output
    said = CliRunner().invoke(app, ["show", redis_server.url, "redis-lost"])
    assert "the key is there under tenant 'acme', operation 'charge'" in said.output


def test_lost_runs_are_counted_as_the_reference_says(shop: Shop) -> None:
    shop.killed("taken over")
    shop.killed("held", "hold")
    counted = json.loads(shop.run("stats", shop.url, "--json"))
    assert {each["state"]: each["keys"] for each in counted} == {"abandoned": 1, "unknown": 1}
    listed = json.loads(shop.run("ls", shop.url, "--abandoned", "--json"))
    assert {each["key"]: each["state"] for each in listed} == {"taken over": "running", "held": "unknown"}


def test_lengths_of_time_have_the_units_of_a_configuration(shop: Shop, refuses: Callable[..., str]) -> None:
    shop.lost("k")
    shop.say("resolve", "k", "--error", "no", "--retention", "7d", "--tombstone", "36h")
    record = shop.once.peek("k")
    assert record is not None
    assert record.settled is not None
    assert record.expires == pytest.approx(record.settled + 7 * 86_400, abs=0.01)
    assert record.tombstone == pytest.approx(record.expires + 36 * 3_600, abs=0.01)
    shop.say("watch", "nobody", "--timeout", "10ms", "--every", "1ms", code=1)
    shop.run("doctor", shop.url, "--timeout", "2s")
    assert "s, m, h or d" in refuses("resolve", shop.url, "k", "--error", "no", "--retention", "7x")
    assert "--retention must be at least 0 seconds" in refuses(
        "release", shop.url, "k", *PLACE, "--retention", "-1"
    )
    assert "--retention must be 1 second or more" in refuses("bench", shop.url, "--retention", "10ms")


def test_so_have_those_of_sweeps_and_the_inbox(tmp_path: Path) -> None:
    from semel.messaging import Inbox, Outbox

    url = f"sqlite:///{tmp_path}/app.db"
    with Outbox(url) as outbox, Inbox(url, consumer="c") as inbox:
        outbox.create()
        inbox.create()
    for words in (
        ["outbox", "sweep", url, "--claim-check", "sql", "--grace", "1h"],
        ["inbox", "purge", url, "--consumer", "c", "--retention", "7d"],
        ["http", "sweep", f"file://{tmp_path}", "--grace", "1h"],
    ):
        done = CliRunner().invoke(app, words)
        assert done.exit_code == 0, done.output


ROW = (
    "unknown",
    "default",
    "transfer",
    "k" * 8,
    "1",
    "12 s ago",
    "–",
    "–",
    "ConnectionError: " + "no answer " * 6,
)
HEADS = ("state", "tenant", "operation", "key", "attempts", "changed", "lease", "ref", "error")


def _page(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], wide: int, key: str
) -> list[str]:
    """What `show` prints on a terminal."""

    def terminal(width: int = wide) -> Console:
        return Console(width=width, force_terminal=True, color_system=None)

    monkeypatch.setattr(tables, "Console", terminal)
    row = tuple(key if cell == ROW[3] else cell for cell in ROW)
    tables.show(HEADS, [row], empty="", whole="key", cut="error")
    return [re.sub(r"\x1b\[\d*m", "", line).rstrip() for line in capsys.readouterr().out.splitlines()]


def test_a_narrow_terminal_gets_whole_words_without_empty_columns(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    head, row = _page(monkeypatch, capsys, 80, "order-77")
    assert head.split() == ["state", "tenant", "operation", "key", "attempts", "changed", "error"]
    assert row.endswith("…")
    assert len(row) <= 80
    assert "order-77" in row


def test_a_wide_one_gets_everything(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    head, row = _page(monkeypatch, capsys, 200, "order-77")
    assert tuple(head.split()) == HEADS
    assert row.endswith("no answer")


def test_no_terminal_is_so_narrow_that_words_are_broken_or_lost(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    head, *rows = _page(monkeypatch, capsys, 40, "0" * 36)
    assert head.split() == ["state", "tenant", "operation", "key", "attempts", "changed", "error"]
    said = " ".join(rows)
    for word in ("unknown", "default", "transfer", "0" * 36, "12 s", "ago", "…"):
        assert word in said


def test_a_key_that_is_settled_is_refused_in_the_words_of_the_command(
    shop: Shop, refuses: Callable[..., str]
) -> None:
    shop.once.execute("done", lambda: 1)
    for key in ("told", "free", "denied"):
        shop.lost(key)
    shop.say("resolve", "told", "--value", "1")
    shop.say("resolve", "denied", "--error", "no")
    shop.say("release", "free")
    for command, word in (("resolve", ["--value", "1"]), ("release", [])):
        said = {
            key: refuses(command, shop.url, key, *PLACE, *word) for key in ("done", "told", "denied", "free")
        }
        assert (
            "is done, and only unknown or failed keys, and runs whose lease is over, can be" in said["done"]
        )
        assert "--correct" not in said["done"], "no person gave it"
        assert "is done, as a person said" in said["told"]
        assert "is failed, as a person said" in said["denied"]
        for key in ("told", "denied"):
            assert ("add --correct" in said[key]) is (command == "resolve")
        assert "is released already: the next caller runs it" in said["free"]
        for key in ("done", "told", "denied"):
            assert f"To let the key run anew: semel forget {shop.url} {key} --tenant acme" in said[key]
        assert not any("correct=True" in each or "`forget`" in each for each in said.values())


def test_an_error_is_shown_with_its_code_and_a_correction_as_one(shop: Shop) -> None:
    shop.lost("k", on_error="replay")
    assert re.search(r"^error +Declined \(card_declined\): no funds$", shop.say("show", "k"), re.MULTILINE)
    shop.say("resolve", "k", "--error", "no", "--actor", "ann")
    shop.say("resolve", "k", "--value", "1", "--correct", "--actor", "bob", "--reason", "oops")
    shop.say("resolve", "k", "--value", "2", "--correct", "--actor", "cid")
    said = [line.partition("  ")[2] for line in shop.say("show", "k").splitlines()[-3:]]
    assert said == ["failed by ann", "done by bob (corrected): oops", "done by cid (corrected)"]


def test_a_word_on_another_record_of_the_key_is_no_correction() -> None:
    told = Event(1.0, Kind.FAILED, State.UNKNOWN, "ann", "")
    again = Event(3.0, Kind.DONE, State.FAILED, "bob", "")
    assert [said for _, said in trail([told, again], since=2.0)] == ["failed by ann", "done by bob"]
    assert [said for _, said in trail([told, again], since=0.5)] == [
        "failed by ann",
        "done by bob (corrected)",
    ]


def test_files_that_are_not_there_are_named(tmp_path: Path, refuses: Callable[..., str]) -> None:
    said = refuses("ls", f"sqlite:///{tmp_path}/nope.db")
    assert said == (
        f"semel: there is no file '{tmp_path}/nope.db': correct the URL. The program that uses it makes it\n"
    )
    assert refuses("config", "nope.toml") == "semel: there is no file 'nope.toml'\n"
    assert list(tmp_path.iterdir()) == []


def test_a_limit_of_nothing_is_refused_by_every_command(shop: Shop, refuses: Callable[..., str]) -> None:
    shop.once.execute("k", lambda: 1)
    for command in ("ls", "stats", "purge"):
        assert "limit must be a whole number, 1 or more, not 0" in refuses(command, shop.url, "--limit", "0")


def test_who_watches_a_run_that_lost_its_worker_is_told_once(shop: Shop) -> None:
    shop.killed("k")
    done = CliRunner().invoke(
        app, ["watch", shop.url, "k", *PLACE, "--timeout", "100ms", "--every", "10ms", "--json"]
    )
    assert done.exit_code == 1
    assert [json.loads(line)["state"] for line in done.stdout.splitlines()] == ["running"]
    assert done.stderr == (
        f"its lease is over: nobody runs it; see semel explain {shop.url} k --tenant acme --operation charge\n"
    )


def test_what_the_output_cannot_spell_is_shown_as_its_numbers(tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path / 'semel.db'}"

    def pay() -> None:
        raise Declined("–")

    with Semel(url) as once, pytest.raises(Declined):
        once.execute("zażółć", pay, on_error="replay")
    shown, data = (
        subprocess.run(
            [sys.executable, "-m", "semel", "ls", url, *more],
            env=os.environ | {"PYTHONIOENCODING": "ascii", "COLUMNS": "200"},
            capture_output=True,
            check=True,
            text=True,
        ).stdout
        for more in ((), ("--json",))
    )
    assert r"za\u017c\xf3\u0142\u0107" in shown
    assert json.loads(data)[0]["key"] == "zażółć"


def test_the_doctors_json_is_ascii_too(tmp_path: Path) -> None:
    """What Windows or an old locale writes for a letter would not be JSON."""
    place = tmp_path / "zażółć 🜚"
    place.mkdir()
    url = f"sqlite:///{place / 'semel.db'}"

    def told(code: int) -> Any:
        done = subprocess.run(
            [sys.executable, "-m", "semel", "doctor", url, "--json"],
            env=os.environ | {"PYTHONIOENCODING": "cp1250"},
            capture_output=True,
            check=False,
        )
        assert done.returncode == code
        return json.loads(done.stdout.decode("ascii"))

    assert place.name in told(2)["verdict"]["text"]
    with Semel(url) as once:
        once.execute("k", lambda: 1)
    assert place.name in told(0)["url"]
