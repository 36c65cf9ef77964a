"""What the command line refuses, in its own words: options instead of Python's, 2 for a wrong use."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from semel import InProgress, LeaseLost, Semel
from semel.cli import main
from semel.messaging import Inbox
from semel.stores.memory import MemoryStore
from semel.testing import services
from tests.command_line import refused


@pytest.fixture
def url(tmp_path: Path) -> str:
    where = f"sqlite:///{tmp_path}/semel.db"
    with Semel(where) as once:
        once.execute("k", lambda: 1)
        for key in ("a", "b"):
            with pytest.raises(ZeroDivisionError):
                once.execute(key, lambda: 1 / 0, on_error="replay")
    return where


@pytest.fixture
def says(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Says:
    return Says(monkeypatch, capsys)


class Says:
    """The command, in this process."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
        self._monkeypatch, self._capsys = monkeypatch, capsys

    def refused(self, *words: str) -> str:
        self._monkeypatch.setattr("sys.argv", ["semel", *words])
        return refused(main, self._capsys)

    def done(self, *words: str, code: int = 0) -> tuple[str, str]:
        self._monkeypatch.setattr("sys.argv", ["semel", *words])
        with pytest.raises(SystemExit) as left:
            main()
        assert (left.value.code or 0) == code
        return tuple(self._capsys.readouterr())  # type: ignore[return-value]  # two texts


def test_without_the_extra_it_leaves_with_2(
    says: Says, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in [name for name in sys.modules if name.startswith("semel.cli.")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "typer", None)
    assert 'pip install "semel[cli]"' in says.refused("--version")


def test_a_report_that_cannot_be_written_is_told_before_the_work(says: Says, tmp_path: Path) -> None:
    said = says.refused("chaos", "--report", "/proc/nope")
    assert said.startswith("semel: --report /proc/nope: nothing can be written there (")
    (tmp_path / "file").touch()
    assert "name another folder" in says.refused("chaos", "--report", str(tmp_path / "file"))


@pytest.mark.parametrize("words", [("ls",), ("stats",), ("purge",), ("show", "k"), ("explain", "k")])
def test_a_store_in_memory_is_its_programs_own(says: Says, words: tuple[str, ...]) -> None:
    command, *rest = words
    assert "lives in the process of the program" in says.refused(command, "memory://shop", *rest)


def test_tables_that_are_not_there_are_a_matter_of_the_option(says: Says, url: str, tmp_path: Path) -> None:
    said = says.refused("ls", url, "--table", "orders")
    assert said.endswith(": correct the URL, or name the program's --table\n")
    assert "create=True" not in said
    said = says.refused("stats", f"sqlite:///{tmp_path}/other.db")
    assert "other.db': correct the URL." in said
    assert "--table" not in said, "there is no file to have another one"
    assert not (tmp_path / "other.db").exists()


@pytest.mark.parametrize(
    "words", [("outbox", "stats"), ("outbox", "ls"), ("inbox", "dead", "--consumer", "c")]
)
def test_so_are_those_of_messaging(says: Says, url: str, tmp_path: Path, words: tuple[str, ...]) -> None:
    group, command, *rest = words
    said = says.refused(group, command, url, *rest)
    assert said.endswith(": correct the URL, or name the program's --table\n")
    assert "create" not in said
    said = says.refused(group, command, f"sqlite:///{tmp_path}/other.db", *rest)
    assert "other.db': correct the URL." in said
    assert "--table" not in said
    assert not (tmp_path / "other.db").exists()


@pytest.mark.parametrize("scheme", ["sqlite", "sqlite+aiosqlite"])
def test_a_relay_makes_no_file_of_a_mistyped_name(says: Says, tmp_path: Path, scheme: str) -> None:
    url = f"{scheme}:///{tmp_path}/typo.db"
    said = says.refused("relay", url, "--route", "orders=https://shop.example", "--drain")
    assert "there is no file" in said
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("command", ["replay", "delete"])
def test_dead_letters_that_are_not_there_are_told_to_scripts(
    says: Says, tmp_path: Path, command: str
) -> None:
    url = f"sqlite:///{tmp_path}/app.db"
    with Inbox(url, consumer="c") as inbox:
        inbox.create()
    assert says.done("inbox", command, url, "nobody", "--consumer", "c", code=1)[0].startswith("0 letters ")


def test_H26_a_sweep_of_a_place_that_is_not_there_is_refused_and_makes_nothing(
    says: Says, tmp_path: Path
) -> None:
    assert "there is no file" in says.refused("http", "sweep", f"sqlite:///{tmp_path}/typo.db")
    assert "there is no folder" in says.refused("http", "sweep", f"file://{tmp_path}/typo")
    assert "there is no file" in says.refused("http", "sweep", "sqlite://")
    assert list(tmp_path.iterdir()) == []
    (tmp_path / "bodies").mkdir()
    assert says.done("http", "sweep", f"file://{tmp_path}/bodies")[0] == "0 bodies removed\n"


@pytest.mark.services
def test_tables_that_are_not_there_are_a_matter_of_the_option_on_servers(
    says: Says, postgres_server: services.PostgresServer, mariadb_server: services.MariaServer
) -> None:
    for server in (postgres_server, mariadb_server):
        said = says.refused("ls", server.database(), "--table", "orders")
        assert "orders" in said
        assert said.endswith(": correct the URL, or name the program's --table\n")


def test_the_demo_names_itself_as_it_was_called() -> None:
    ran = subprocess.run(
        [sys.executable, "-m", "semel", "demo", "--workers", "1"], capture_output=True, text=True, check=False
    )
    assert ran.returncode == 2
    assert ran.stderr.startswith("usage: semel demo ")
    assert "python -m semel.demo" not in ran.stderr


def test_a_key_that_is_not_there_is_explained_with_where_it_was_looked_for(says: Says, url: str) -> None:
    said, _ = says.done("explain", url, "nothing", "--operation", "pay")
    assert said.startswith("no record of 'nothing' under tenant 'default', operation 'pay'\n")
    said, _ = says.done("explain", url, "0" * 64, "--scope")
    assert said.startswith(f"no record of '{'0' * 64}'\n")
    said, _ = says.done("explain", url, "k")
    assert said.startswith("done: k\n")


@pytest.mark.parametrize("command", ["explain", "show", "watch", "forget"])
def test_a_key_that_can_be_none_is_a_wrong_use(says: Says, url: str, command: str) -> None:
    assert "key is empty" in says.refused(command, url, "")


def test_a_scope_has_its_own_tenant_and_operation(says: Says, url: str) -> None:
    for option in ("--operation", "--tenant"):
        said = says.refused("show", url, "0" * 64, "--scope", option, "zzz")
        assert "leave --tenant and --operation out" in said


def test_counts_that_are_cut_say_so(says: Says, url: str) -> None:
    assert "the first 1 records only: --limit counts more" in says.done("stats", url, "--limit", "1")[1]
    assert says.done("stats", url, "--limit", "1", "--json")[1]
    assert says.done("stats", url, "--limit", "3")[1] == ""


def test_times_that_are_none_are_refused(says: Says, url: str) -> None:
    assert "--timeout must be 0 seconds or more, not -1" in says.refused("watch", url, "k", "--timeout", "-1")
    assert "--timeout must be above 0 seconds, not 0" in says.refused("doctor", url, "--timeout", "0")
    assert "--timeout" in says.refused("doctor", url, "--timeout", "nan")
    says.done("watch", url, "nothing", "--timeout", "0", code=1)


def test_the_statements_are_printed_for_drivers_that_there_are(says: Says, url: str) -> None:
    assert "settings.table" not in says.done("schema", "sql", url, "--table", "jobs")[0]
    for scheme, driver, others in (
        ("mysql", "aiomysql", "mysql+asyncmy://"),
        ("postgresql", "psycopg2", "postgresql+asyncpg://"),
        ("sqlite", "aiosqlite", "plain sqlite://"),
    ):
        said = says.refused("schema", "sql", f"{scheme}+{driver}://host/shop")
        assert f"semel does not use the driver '{driver}': write {others}" in said
    for scheme in ("mysql+pymysql", "mariadb+asyncmy", "postgresql+psycopg", "postgres"):
        assert "create table" in says.done("schema", "sql", f"{scheme}://host/shop")[0].lower()


def test_a_key_that_cannot_be_resolved_is_named_as_everywhere_and_the_place_is_doubted(
    says: Says, url: str
) -> None:
    with Semel(url) as once:
        record = once.peek("k")
    assert record is not None
    assert record.scope is not None
    assert f"[{record.scope.hex[:8]}] of default/default" in says.refused("release", url, "k")
    assert "are tenant and operation those of its call?" in says.refused("release", url, "nobody")


def test_only_a_run_that_has_its_worker_is_called_running() -> None:
    store = MemoryStore(clock=lambda: now)
    now = 1_000.0
    with Semel(store) as once, once.claim("k") as claim:
        with pytest.raises(InProgress, match=r"is running \(attempt 1\): only an unknown or failed key"):
            once.resolve("k", release=True)
        now += 60
        once.resolve("k", release=True)
        with pytest.raises(LeaseLost):
            claim.complete(None)


@pytest.mark.parametrize("option", ["--json", "--state=failed"])
def test_an_output_that_cannot_be_written_is_told_in_one_line(url: str, option: str) -> None:
    with Path("/dev/full").open("w") as full:
        ran = subprocess.run(
            [sys.executable, "-m", "semel", "ls", option, url],
            stdout=full,
            stderr=subprocess.PIPE,
            text=True,
            check=False,
        )
    assert (ran.returncode, ran.stderr.count("\n")) == (3, 1)
    assert "could not be written" in ran.stderr
    assert "No space left" in ran.stderr


def test_an_output_that_cannot_be_written_has_its_code_though_nothing_can_be_told(url: str) -> None:
    """`> log 2>&1` on a full disk: it was a 1, which some commands say for something else."""
    with Path("/dev/full").open("w") as full:
        program = [sys.executable, "-m", "semel", "ls"]
        codes = [
            subprocess.run([*program, which], stdout=full, stderr=full, check=False).returncode
            for which in (url, "nonsense://")
        ]
    assert codes == [3, 2]
