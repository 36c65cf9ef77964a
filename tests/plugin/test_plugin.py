"""The plugin as its user meets it: a real pytest in a process of its own, real children that are killed, and the report."""

from __future__ import annotations

import contextlib
import os
import shutil
import sys
import uuid
from importlib.metadata import entry_points
from pathlib import Path

import pytest

from semel import AsyncSemel, ConfigurationError, InProgress, Semel, current_run
from semel.testing.plugin import prove
from semel.testing.plugin_report import Report
from semel.testing.plugin_tries import Try
from semel.testing.plugin_windows import Window
from tests.threads import failure_in_another_thread

pytest_plugins = ["pytester"]
pytestmark = pytest.mark.slow

HANDLERS = Path(__file__).parents[2] / "examples" / "handlers"
# Without the entry point (a checkout that was installed before there was one) it is named by hand.
INSTALLED = any(each.value == "semel.testing.plugin" for each in entry_points(group="pytest11"))
PLUGIN = () if INSTALLED else ("-p", "semel.testing.plugin")
# Other people's plugins that happen to be installed here: importing them takes longer than most of these tests.
OTHERS = (
    "valkey",
    "cacheprovider",
    "schemathesis",
    "faker",
    "hypothesispytest",
    "xdist",
    "xdist.looponfail",
    "anyio",
)


def run(pytester: pytest.Pytester, *words: str) -> pytest.RunResult:
    return pytester.run(
        sys.executable,
        "-m",
        "pytest",
        *PLUGIN,
        *(f"-pno:{other}" for other in OTHERS),
        "-s",
        *words,
        timeout=100,
    )


@pytest.fixture
def shipped(pytester: pytest.Pytester) -> pytest.Pytester:
    shutil.copytree(
        HANDLERS, pytester.path / "examples" / "handlers", ignore=shutil.ignore_patterns("__pycache__")
    )
    return pytester


@pytest.mark.parametrize("which", ["transaction", "downstream_key", "steps"])
def test_a_right_handler_is_found_right(shipped: pytest.Pytester, which: str) -> None:
    run(shipped, "examples/handlers", "-k", which).assert_outcomes(passed=1, deselected=6)


@pytest.mark.parametrize(
    "which, report",
    [
        (
            "without_a_key",
            ["*run.returned  the effect happened*2 DOUBLED*", "doubled: *run.returned*settle.sent*"],
        ),
        (
            "mark_before",
            ["*bank.charge(order)*0 LOST*", "lost: *mark_first.py:*", "*no call of semel was seen*"],
        ),
        ("check_before", ["*finish(order)*2 DOUBLED*2 DOUBLED*", "doubled: *check_then_act.py:*"]),
        (
            "hangs_up",
            [
                "*claim.won  *1 * -",
                "*slow_receipt.py:17 *1 * -",
                "*slow_receipt.py:18 *2 DOUBLED *2 DOUBLED",
                "*run.returned  *2 DOUBLED * -",
                "*handler returned  *missed",
                "*a cancel does not strike here: *next await*",
                "*missed: no await follows*",
            ],
        ),
    ],
)
def test_a_wrong_handler_is_found_wrong_in_the_right_window(
    shipped: pytest.Pytester, which: str, report: list[str]
) -> None:
    # The shipped tests also assert each window by name.
    result = run(shipped, "examples/handlers", "-k", which)
    result.assert_outcomes(passed=1, deselected=6)
    result.stdout.fnmatch_lines(report)


def test_a_failing_assertion_shows_the_report(pytester: pytest.Pytester) -> None:
    pytester.makepyfile(
        """
        def handle(path):
            with open(path, "a") as file:
                file.write("x")

        def test_it(exactly_once, tmp_path):
            report = exactly_once(
                handle,
                arguments=lambda key: (tmp_path / key,),
                effects=lambda key: len((tmp_path / key).read_text()) if (tmp_path / key).exists() else 0,
                faults=["kill"],
            )
            assert report.holds, report
        """
    )
    result = run(pytester)
    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines(
        ["*handle: doubled in *", "*handler returned*2 DOUBLED*", "*called twice*2 DOUBLED*", "*doubled: *"]
    )


def test_a_marked_test_is_a_handler_and_its_failure_is_the_report(pytester: pytest.Pytester) -> None:
    pytester.makepyfile(
        """
        import pytest
        from pathlib import Path

        @pytest.mark.exactly_once(effects=lambda key: len(list(Path("out").glob(f"{key}-*"))), faults=["kill"])
        def test_it(once_key):
            Path("out").mkdir(exist_ok=True)
            n = len(list(Path("out").glob(f"{once_key}-*")))
            Path("out", f"{once_key}-{n}").touch()
        """
    )
    result = run(pytester, "--strict-markers")
    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines(["*test_it: doubled in *"])


def test_a_held_outcome_is_told_as_unknown_and_never_doubles(pytester: pytest.Pytester) -> None:
    pytester.makepyfile(
        """
        from pathlib import Path
        from semel import Semel

        once = Semel("sqlite:///semel.db")

        def handle(key):
            once.execute(key, effect, key, on_unknown="hold")

        def effect(key):
            with open(key, "a") as file:
                file.write("x")

        def test_it(exactly_once):
            report = exactly_once(
                handle,
                arguments=lambda key: (key,),
                effects=lambda key: len(Path(key).read_text()) if Path(key).exists() else 0,
                faults=["kill"],
            )
            errors = [line for line in str(report).splitlines() if line.startswith("  error: ")]
            assert len(errors) == 1 and errors[0].startswith("  error: OutcomeUnknown: "), errors
            assert errors[0].endswith(f" (in {len(report.failures)} tries)"), errors
            assert report.never_doubles and not report.holds
            assert report.verdict("run.started", "kill") == report.verdict("run.returned", "kill") == "unknown"
            assert report.verdict("claim.sent", "kill") == report.verdict("settle.stored", "kill") == "once"
        """
    )
    run(pytester).assert_outcomes(passed=1)


def test_fixed_arguments_work_with_a_reset(pytester: pytest.Pytester) -> None:
    pytester.makepyfile(
        """
        from pathlib import Path

        def handle(name):
            Path(name).touch()  # the same again: harmless

        def test_it(exactly_once):
            report = exactly_once(
                run=handle,
                arguments=("order-1",),
                effects=lambda: int(Path("order-1").exists()),
                reset=lambda: Path("order-1").unlink(missing_ok=True),
            )
            assert report.holds, report
        """
    )
    run(pytester).assert_outcomes(passed=1)


def test_an_effect_in_memory_is_refused_with_the_reason(tmp_path: Path) -> None:
    seen: list[str] = []
    with pytest.raises(ConfigurationError, match="in another process"):
        prove(seen.append, arguments=lambda key: (key,), effects=seen.count)
    assert seen == []


def test_a_handler_that_fails_by_itself_is_not_blamed_on_a_fault() -> None:
    def handle(key: str) -> None:
        raise ValueError(f"no {len(key)}")

    with pytest.raises(RuntimeError, match="fails without any fault: ValueError: no"):
        prove(handle, arguments=lambda key: (key,), effects=lambda key: 0)


def test_fixed_arguments_without_a_reset_are_refused() -> None:
    with pytest.raises(ConfigurationError, match="reset="):
        prove(print, arguments=("order-1",), effects=lambda: 1)


def test_an_unknown_fault_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="kill, zombie, interrupt"):
        prove(print, arguments=lambda key: (key,), effects=lambda key: 1, faults=["flood"])  # type: ignore[list-item]  # wrong on purpose


def report_of(*verdicts: str) -> Report:
    tries = tuple(
        Try(window=Window(f"w{at}", 1, f"line {at}"), fault="kill", effects=1, verdict=verdict)
        for at, verdict in enumerate(verdicts)
    )
    return Report(handler="h", expected=1, tries=tries, faults=("kill",), seconds=0.0)


def test_a_report_holds_only_when_every_window_was_met_and_is_once() -> None:
    assert report_of("once", "once").holds
    assert not report_of().holds, "nothing tried is nothing shown"
    for other in ("doubled", "lost", "failed", "unknown", "stuck", "missed"):
        report = report_of("once", other)
        assert not report.holds
        assert report.windows(other) == ("w1",)
        assert f"{other}: w1" in str(report)
    assert not report_of("missed").never_doubles
    assert not report_of("unknown").never_loses


def test_a_handler_whose_key_is_new_in_every_call_is_told_so_and_not_to_commit_in_one_transaction(
    tmp_path: Path,
) -> None:
    once = Semel(f"sqlite:///{tmp_path / 'semel.db'}")

    def handle(key: str) -> None:
        once.execute(f"{key}-{uuid.uuid4()}", act, key)

    def act(key: str) -> None:
        with (tmp_path / key).open("a") as book:
            book.write("x")

    def count(key: str) -> int:
        return (tmp_path / key).stat().st_size if (tmp_path / key).exists() else 0

    report = prove(handle, arguments=lambda key: (key,), effects=count, faults=["kill"])
    assert report.verdict("called twice", "none") == "doubled"
    assert report.verdict("claim.won", "kill") == "once"
    assert "even when nothing goes wrong" in str(report)
    assert "one transaction" not in str(report)
    once.close()


def test_a_window_is_found_by_its_name_or_its_line_and_a_wrong_name_is_told() -> None:
    report = report_of("once", "lost")
    assert report.verdict("w1", "kill") == report.verdict("line 1", "kill") == "lost"
    with pytest.raises(KeyError, match="no window"):
        report.verdict("w9", "kill")


@pytest.mark.services
@pytest.mark.parametrize("server", ["redis_server", "postgres_server", "mariadb_server"])
def test_an_async_handler_is_proved_on_its_own_server(
    server: str, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    started = request.getfixturevalue(server)
    once = AsyncSemel(started.url if server == "redis_server" else started.database())

    async def keyed(key: str) -> None:
        async def effect() -> None:
            (tmp_path / current_run().downstream_key("file")).write_text(key)

        await once.execute(key, effect)
        await once.aclose()

    async def unkeyed(key: str) -> None:
        async def effect() -> None:
            (tmp_path / os.urandom(8).hex()).write_text(key)

        await once.execute(key, effect)
        await once.aclose()

    def count(key: str) -> int:
        return sum(path.read_text() == key for path in tmp_path.iterdir())

    report = prove(keyed, arguments=lambda key: (key,), effects=count)
    assert report.holds, str(report)
    wrong = prove(unkeyed, arguments=lambda key: (key,), effects=count, faults=["kill", "interrupt"])
    assert wrong.windows("doubled", fault="kill") == ("run.returned", "settle.sent"), str(wrong)
    assert wrong.never_loses, str(wrong)


class Handler:
    """A handler that is an object, and its call a coroutine."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    async def __call__(self, key: str) -> None:
        (self.folder / key).touch()

    def count(self, key: str) -> int:
        return int((self.folder / key).exists())


def test_an_object_whose_call_is_a_coroutine_is_a_handler(tmp_path: Path) -> None:
    handler = Handler(tmp_path)
    report = prove(handler, arguments=lambda key: (key,), effects=handler.count, faults=["kill"])
    assert report.holds, str(report)


def test_arguments_that_are_no_tuple_are_refused_by_name(tmp_path: Path) -> None:
    handler = Handler(tmp_path)
    with pytest.raises(ConfigurationError, match=r"gave the text 'try-.*arguments=lambda key: \(key,\)"):
        prove(handler, arguments=lambda key: key, effects=handler.count)
    with pytest.raises(
        ConfigurationError, match=r"gave 5: give a tuple of arguments, arguments=lambda key: \(key,\)"
    ):
        prove(handler, arguments=lambda _: 5, effects=handler.count)  # type: ignore[arg-type,return-value]  # wrong on purpose


def test_an_interrupt_in_a_thread_of_the_handlers_strikes_its_main_thread(tmp_path: Path) -> None:
    def work(key: str) -> None:
        (tmp_path / key).touch()

    def handle(key: str) -> None:
        if failure_in_another_thread(lambda: work(key)) is not None:
            (tmp_path / f"{key}.struck").touch()

    report = prove(
        handle,
        arguments=lambda key: (key,),
        effects=lambda key: int((tmp_path / key).exists()) + int((tmp_path / f"{key}.struck").exists()),
        faults=["interrupt"],
    )
    assert report.holds, str(report)


def test_a_handler_that_fails_is_shown_without_the_lines_of_the_plugin_and_of_drivers(
    pytester: pytest.Pytester,
) -> None:
    pytester.makepyfile(
        """
        import pytest
        from semel import Semel

        once = Semel("redis://127.0.0.1:1/0", timeout=0.2)

        def handle(key):
            once.execute(key, print, key)

        def test_fixture(exactly_once):
            exactly_once(handle, arguments=lambda key: (key,), effects=lambda key: 1)

        @pytest.mark.exactly_once(effects=lambda key: 1)
        def test_mark(once_key):
            handle(once_key)
        """
    )
    result = run(pytester)
    result.assert_outcomes(failed=2)
    cause = "E *RuntimeError: the handler fails*cannot reach Redis*is the server running*"
    result.stdout.fnmatch_lines(
        [cause, "*once.execute(key, print, key)", cause, "*once.execute(key, print, key)"]
    )
    told = result.stdout.str()
    for other in ("plugin.py", "plugin_tries.py", "site-packages", "/semel/"):
        assert other not in told, other
    assert len(told.splitlines()) < 60


def test_a_mark_without_effects_is_refused_with_the_remedy(pytester: pytest.Pytester) -> None:
    pytester.makepyfile(
        """
        import pytest

        @pytest.mark.exactly_once
        def test_it(once_key): ...
        """
    )
    run(pytester).stdout.fnmatch_lines(["*exactly_once needs effects=*"])


def test_a_fixture_without_effects_or_a_handler_is_refused_with_the_remedy(pytester: pytest.Pytester) -> None:
    pytester.makepyfile(
        """
        def test_it(exactly_once):
            exactly_once(print, arguments=lambda key: (key,))

        def test_without_a_handler(exactly_once):
            exactly_once(effects=len)

        def test_with_more(exactly_once):
            exactly_once(print, (1,), effects=len)
        """
    )
    handler = "*ConfigurationError: exactly_once needs one handler, and everything else by its name: *"
    run(pytester).stdout.fnmatch_lines(
        [
            "*ConfigurationError: exactly_once needs effects=*exactly_once(handler, effects=count)*",
            handler,
            handler,
        ]
    )


@pytest.mark.parametrize("given", ["nonsense=1", "lease=1, retries=3"])
def test_an_option_that_there_is_not_is_refused_with_those_that_there_are(
    pytester: pytest.Pytester, given: str
) -> None:
    pytester.makepyfile(
        f"""
        import pytest

        @pytest.mark.exactly_once(effects=len, {given})
        def test_marked(once_key): ...

        def test_given(exactly_once):
            exactly_once(print, effects=len, {given})
        """
    )
    unknown = given.rpartition(" ")[2].partition("=")[0]
    said = f"*ConfigurationError: exactly_once has no option {unknown}; it has effects, *"
    run(pytester).stdout.fnmatch_lines([said, said])


def test_a_marked_test_must_take_its_key_itself(pytester: pytest.Pytester) -> None:
    pytester.makepyfile(
        """
        import pytest
        from pathlib import Path

        def count(key):
            return Path(key).stat().st_size if Path(key).exists() else 0

        @pytest.fixture
        def order(once_key):
            return f"order-{once_key}"

        @pytest.mark.exactly_once(effects=count, faults=["kill"])
        def test_through_a_fixture(order):
            Path(order).write_text("x")

        @pytest.mark.exactly_once(effects=count, faults=["kill"])
        def test_without():
            Path("one").write_text("x")

        @pytest.mark.exactly_once(effects=count, faults=["kill"], arguments=lambda key: (key,))
        def test_with_arguments(tmp_path):
            Path(tmp_path).write_text("x")

        @pytest.mark.exactly_once(
            effects=lambda: count("two"), faults=["kill"], reset=lambda: Path("two").unlink(missing_ok=True)
        )
        def test_with_a_reset(tmp_path):
            Path("two").write_text("x")
        """
    )
    result = run(pytester)
    result.assert_outcomes(failed=2, passed=2)
    result.stdout.fnmatch_lines(
        [
            "*a marked test must take once_key itself, def test_through_a_fixture(once_key, *",
            "*a marked test must take once_key itself, def test_without(once_key, *",
        ]
    )


def test_a_handler_that_hides_that_another_is_at_it_has_told_a_success_that_is_none(tmp_path: Path) -> None:
    once = Semel(f"sqlite:///{tmp_path / 'semel.db'}")

    def effect(key: str) -> None:
        (tmp_path / key).touch()

    def hides(key: str) -> None:
        with contextlib.suppress(InProgress):
            once.execute(key, effect, key)

    def count(key: str) -> int:
        return int((tmp_path / key).exists())

    report = prove(hides, arguments=lambda key: (key,), effects=count, faults=["zombie"], lease=None)
    assert report.verdict("claim.won", "zombie") == "lost", str(report)
    assert "none of its errors swallowed" in str(report)
