"""What `./test` runs once .venv exists: lint, types, tests by part, coverage, a table of times.

A part is a folder below tests/, or `lint`. The exit code is 0 only if everything that was asked for ran and passed.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
import xml.etree.ElementTree as ET
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Self

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / ".results"
BIN = Path(sys.executable).parent

# Slowest first: two run at a time.
LINTERS = {
    "mypy": ["mypy", "src", "tests", "scripts", "benches", "examples"],
    "pyright": ["pyright"],
    "ruff check": ["ruff", "check", "."],
    "ruff format": ["ruff", "format", "--check", "."],
    "layers": ["lint-imports"],
}
QUICK = ("unit", "contract", "typing")
# Every other part runs in as many processes as `--workers` says.
SERIAL = {"chaos", "simulation"}  # they keep all cores busy by processes of their own
# Nothing but work for the processor, in virtual time: done beside the other parts, while those wait, at the lowest priority there is.
# A part that keeps all cores busy comes when this is over: nobody could do anything beside it.
ASIDE = ("lint", "simulation")
# Much of their time these wait for what was killed, paused or started: two processes more, or one in each of two runs at a time.
WAITING = {"grpc", "http", "messaging", "ops", "plugin", "processes", "races", "within"}
FIRST = ("unit", "typing", "contract")
# Of a complete run two are played at a time, these first: much of their time they wait, and one's last long test is no idle core.
LONGEST = ("ops", "messaging", "within", "http", "plugin")
LANES = 2
# These share one run: each would leave a core idle while its last long test ends, and start everything for a few seconds:
# every process of a run imports all drivers and starts a server of each kind for itself.
TOGETHER = (
    ("contract", "unit", "typing"),
    ("within", "rulings"),
    ("races", "processes"),
    ("docs", "mutants"),
    ("plugin", "security", "telemetry"),
)
# pytest plugins that come with libraries and take a second to import, in every process: who needs them.
BYSTANDERS = {"faker": set[str](), "schemathesis": {"http"}}
# In virtual time, against the clock, in children that are killed or patched, or to be read: measuring would slow them,
# and what they run counts as tested only where it is also looked at. And storms of signals whose handlers raise: one that hits
# inside of coverage's own lock leaves it held, and the process hangs.
UNMEASURED = {"simulation", "chaos", "mutants", "races", "processes", "plugin", "docs", "security"}
BUDGET = 15 * 60
# What a server does with its disk is looked at here; the crash matrix itself knows of which one.
DISKS = {"chaos", "mutants"}
# Here one failure in a thousand runs is a broken promise, or nothing but logic was tested: it counts, however seldom it comes.
PROOF = {
    "chaos", "contract", "mutants", "processes", "races", "rulings", "security", "simulation", "typing", "unit", "within",
}  # fmt: skip
PROOFS = re.compile(r"crash|strike|storm|race")  # and such files elsewhere
FEW = 3
MANY = 20  # failures told once more at the end
MESSAGE = 300  # characters of each
PATIENCE = 15 * 60  # of one part; pytest ends every single test long before
MEASURED_PATIENCE = 60 * 60  # as tests/conftest.py gives every single test more time when it is measured
INTERRUPTED = 2  # as pytest says it


@dataclass(frozen=True, slots=True)
class Row:
    """One line of the closing table."""

    part: str
    ok: bool
    seconds: float
    passed: int = 0
    failed: int = 0
    skipped: int = 0
    note: str = ""
    unsteady: tuple[str, ...] = ()
    """Tests that failed among the others and passed when only their files ran."""
    broken: tuple[str, ...] = ()
    """Tests that failed, each with why, or what a linter said."""


def main() -> int:
    """Run what the command line asks for."""
    options = _options()
    os.chdir(ROOT)
    # Ended from outside, the part that runs is ended too (subprocess.run kills it), and its servers end with it.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    # Started in the background, SIGINT is ignored, and children would inherit that: some tests send it to theirs.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    os.environ.setdefault("PYTHONHASHSEED", "0")
    # Hundreds of processes are started here, and each would compile everything that it imports. Who wants no bytecode beside the
    # sources gets it elsewhere.
    if os.environ.pop("PYTHONDONTWRITEBYTECODE", ""):
        os.environ.setdefault("PYTHONPYCACHEPREFIX", str(ROOT / ".venv" / "bytecode"))
    os.environ["SEMEL_TEST"] = "quick" if options.quick else "long" if options.long else "full"
    RESULTS.mkdir(exist_ok=True)
    if options.aside:
        _step_back()
    elif not options.long:  # those install packages
        os.environ |= _machine().few_authorities(RESULTS)
    known = _parts()
    parts = options.part or (["lint", *(p for p in known if not options.quick or p in QUICK)])
    unknown = [part for part in parts if part != "lint" and part not in known]
    if unknown:
        print(f"no such part: {', '.join(unknown)}; parts are: lint {' '.join(known)}")
        return 2
    complete = not (options.part or options.quick or options.k)
    measures = options.coverage or (options.long and complete)
    measured = set(parts) - UNMEASURED - {"lint"} if measures else set[str]()
    if measured:
        _reset_coverage()
    start = time.monotonic()
    rows = list(_all(_runs(parts, measured), options, measured))
    if options.aside:
        Path(options.aside).write_text(json.dumps([asdict(row) for row in rows]), "utf-8")
        return 0
    if measured:
        rows.append(_coverage(gate=complete and _strict()))
    return _report(rows, time.monotonic() - start)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="./test", description=__doc__)
    parser.add_argument("part", nargs="*", help="lint, or a folder below tests/; default: everything")
    parser.add_argument(
        "--quick", action="store_true", help="lint, types, unit and contract without servers (90 s)"
    )
    parser.add_argument("--long", action="store_true", help="also the tests marked `long`")
    parser.add_argument(
        "--coverage", action="store_true", help="measure, and ask for the thresholds if nothing was named"
    )
    parser.add_argument("--install-only", action="store_true", help="set everything up and stop")
    parser.add_argument("-n", "--workers", type=int, default=2, help="processes per part (default 2)")
    parser.add_argument("-k", metavar="EXPRESSION", help="passed on to pytest")
    # Started by another one of us, which reads the rows there.
    parser.add_argument("--aside", metavar="FILE", help=argparse.SUPPRESS)
    return parser.parse_args()


def _parts() -> list[str]:
    folders = {path.relative_to(ROOT / "tests").parts[0] for path in (ROOT / "tests").glob("*/**/test_*.py")}
    return [part for part in FIRST if part in folders] + sorted(folders - set(FIRST))


def _runs(parts: list[str], measured: set[str]) -> list[list[str]]:
    """The parts in their order, those that share a run together; what is measured and what is not never share one."""
    runs: list[list[str]] = []
    for part in parts:
        mates = next((group for group in TOGETHER if part in group), ())
        for run in runs:
            if run[0] in mates and (run[0] in measured) == (part in measured):
                run.append(part)
                break
        else:
            runs.append([part])
    order = {part: at for group in TOGETHER for at, part in enumerate(group)}  # long tests first
    return [sorted(run, key=lambda part: order.get(part, 0)) for run in runs]


def _all(runs: list[list[str]], options: argparse.Namespace, measured: set[str]) -> Iterator[Row]:
    """Every run's rows: one after another, but for what is done beside them."""
    at_once = not options.part and options.workers > 1
    aside = [part for run in runs for part in run if at_once and part in ASIDE]
    rest = sorted((run for run in runs if run[0] not in aside), key=lambda run: run[0] in SERIAL)
    together = [run for run in rest if at_once and run[0] not in {*SERIAL, "lint"}]
    with _Aside(aside, options) as beside:
        yield from _in_lanes(together, options, measured)
        for run in rest:
            if run in together:
                continue
            if run[0] in SERIAL:
                yield from beside.rows()
            yield from _lint() if run == ["lint"] else [_pytest(run, options, measured=run[0] in measured)]
        yield from beside.rows()


def _in_lanes(runs: list[list[str]], options: argparse.Namespace, measured: set[str]) -> Iterator[Row]:
    """Two runs at a time. What each prints is shown when it has ended."""
    rank = {part: at for at, part in enumerate(LONGEST)}
    runs = sorted(runs, key=lambda run: rank.get(run[0], len(rank)))
    lanes = ThreadPoolExecutor(LANES)
    try:
        yield from lanes.map(lambda run: _pytest(run, options, measured=run[0] in measured, lane=True), runs)
    finally:  # also when we are interrupted: what waits is not begun, and what runs is ended
        _OVER.set()
        lanes.shutdown(wait=False, cancel_futures=True)
        for process in list(_LIVE):
            process.kill()
        lanes.shutdown()
        _OVER.clear()


class _Aside:
    """Parts in a process of their own that steps back behind all others. What it prints is shown when it has ended."""

    def __init__(self, parts: list[str], options: argparse.Namespace) -> None:
        self._told = RESULTS / "aside.json"
        self._log = RESULTS / "aside.log"
        self._process: subprocess.Popen[bytes] | None = None
        if not parts:
            return
        self._told.unlink(missing_ok=True)
        words = [*parts, "--aside", str(self._told), "-n", str(options.workers)]
        words += [f"--{name}" for name in ("quick", "long") if getattr(options, name)]
        words += ["-k", options.k] if options.k else []
        with self._log.open("wb") as log:
            # a session of its own: it is ended whole, and its priority holds against other sessions
            self._process = subprocess.Popen(
                [sys.executable, __file__, *words],
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def rows(self) -> list[Row]:
        """Waits for its end. The rows are given once."""
        if self._process is None:
            return []
        code = self._process.wait()
        self._process = None
        print(self._log.read_text("utf-8", "replace"), flush=True)
        if code != 0 or not self._told.exists():
            return [Row("aside", False, 0.0, note=f"what ran beside the others ended with {code}")]
        return [Row(**row) for row in json.loads(self._told.read_text("utf-8"))]

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self._process is not None:  # we were interrupted
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGTERM)
            self._process.wait()


def _step_back() -> None:
    os.nice(19)
    with contextlib.suppress(OSError):  # where the kernel weighs sessions instead of processes
        Path("/proc/self/autogroup").write_text("19", "utf-8")


# -- lint ---------------------------------------------------------------------------------------------------------------
def _lint() -> list[Row]:
    with ThreadPoolExecutor(2) as threads:
        return list(threads.map(_lint_one, LINTERS))


def _lint_one(name: str) -> Row:
    program, *arguments = LINTERS[name]
    if name == "mypy":  # it refuses a folder without Python files
        arguments = [folder for folder in arguments if any(Path(folder).rglob("*.py"))]
    start = time.monotonic()
    done = subprocess.run([BIN / program, *arguments], capture_output=True, text=True, check=False)
    if done.returncode != 0:
        print(f"---- {name}\n{done.stdout}{done.stderr}", flush=True)
    said = [] if done.returncode == 0 else f"{done.stdout}{done.stderr}".splitlines()
    broken = tuple(f"{name}: {line[:MESSAGE]}" for line in said if line.strip())
    return Row(name, done.returncode == 0, time.monotonic() - start, broken=broken)


# -- tests --------------------------------------------------------------------------------------------------------------
def _pytest(parts: list[str], options: argparse.Namespace, *, measured: bool, lane: bool = False) -> Row:
    name = " ".join(parts)
    print(f"==== {name}{': begun' if lane else ''}", flush=True)
    runner = ["coverage", "run", "-m", "pytest"] if measured else ["pytest"]
    report = RESULTS / f"{'-'.join(parts)}.xml"
    report.unlink(missing_ok=True)  # the other parts' stay: somebody may be running them at the same time
    memory = RESULTS / f"{'-'.join(parts)}.cache"
    shutil.rmtree(memory, ignore_errors=True)
    start_again = [sys.executable, "-m", *runner, "-o", f"cache_dir={memory}", "--maxfail=0"]
    command = [*start_again, *(f"tests/{part}" for part in parts), f"--junitxml={report}"]
    if options.workers > 1 and not SERIAL.intersection(parts):
        more = (1 if lane else 2) * bool(WAITING.intersection(parts))
        command += ["-n", str(options.workers + more), "--dist=loadgroup"]
    if options.k:
        command += ["-k", options.k]
    if options.aside:
        command += ["--timeout=900"]  # it comes to it when the others wait
    start = time.monotonic()
    log = RESULTS / f"{'-'.join(parts)}.log" if lane else None
    patience = MEASURED_PATIENCE if measured else PATIENCE
    code = _played(command, _environment(parts), None if options.long or options.aside else patience, log)
    if log is not None:
        print(f"==== {name}\n{log.read_text('utf-8', 'replace')}", flush=True)
    passed, failed, skipped = _counts(report)
    unsteady: tuple[str, ...] = ()
    if code == 1 and not (options.part or options.k or options.aside):
        unsteady = _passed_later(start_again, memory, report, _environment(parts))
        if unsteady:
            code, passed, failed = 0, passed + failed, 0
    # 5 means that nothing was selected: fine when the part holds long tests only, not when it was asked for by name
    nothing = code == 5 and (not options.part or options.aside is not None)
    ok = (code == 0 and passed > 0) or (code == 0 and skipped > 0 and not _strict()) or nothing
    note = "nothing selected" if code == 5 else "" if code in {0, 1} else f"pytest ended with {code}"
    broken = () if unsteady else _broken(report)
    return Row(name, ok, time.monotonic() - start, passed, failed, skipped, note, unsteady, broken)


_LIVE: set[subprocess.Popen[bytes]] = set()
_OVER = threading.Event()


def _played(command: list[str], environment: dict[str, str], patience: float | None, log: Path | None) -> int:
    """The exit code. A part that does not end is interrupted, so that its servers are stopped: pytest-xdist waits for ever when a
    process dies behind its last test."""
    with contextlib.ExitStack() as opened:
        output = None if log is None else opened.enter_context(log.open("wb"))
        process = opened.enter_context(
            subprocess.Popen(command, env=environment, stdout=output, stderr=output)
        )
        _LIVE.add(process)
        opened.callback(_LIVE.discard, process)
        if _OVER.is_set():
            process.kill()
        try:
            return process.wait(patience)
        except subprocess.TimeoutExpired:
            print(f"==== not ended after {patience:.0f} s: interrupted", flush=True)
            process.send_signal(signal.SIGINT)
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(60)
            return INTERRUPTED
        finally:
            process.kill()  # also when this program is told to end; nothing happens when it has ended


def _passed_later(
    start: list[str], memory: Path, report: Path, environment: dict[str, str]
) -> tuple[str, ...]:
    """The tests that failed, if they are few, prove no promise, and pass when only their files run; else none.

    The files, not the tests: what one test left open fails another one. An error before or after a test may be that, too, and
    counts at once; so does a test whose process died, which another process has played again and `lastfailed` does not name.
    """
    told = memory / "v" / "cache" / "lastfailed"
    failed = (
        sorted(re.sub(r"@\w+$", "", name) for name in json.loads(told.read_text("utf-8")))
        if told.exists()
        else []
    )
    ends = _ends(report)
    if not 0 < len(failed) <= FEW or sorted(map(_name, failed)) != sorted(
        name for name, end in ends if end not in {"passed", "skipped"}
    ):
        return ()
    if "error" in {end for _, end in ends} or any(_proves(name) for name in failed):
        return ()
    files = sorted({name.partition("::")[0] for name in failed})
    print(f"==== once more, without the others: {' '.join(files)}", flush=True)
    again = report.with_suffix(".again.xml")
    again.unlink(missing_ok=True)
    code = _played([*start, *files, f"--junitxml={again}"], environment, PATIENCE, None)
    passed = {name for name, end in _ends(again) if end == "passed"}
    return tuple(failed) if code == 0 and passed.issuperset(map(_name, failed)) else ()


def _proves(name: str) -> bool:
    return name.split("/")[1] in PROOF or PROOFS.search(name.partition("::")[0]) is not None


def _name(node: str) -> str:
    """A test as a report of pytest names it: dotted class, name."""
    path, _, rest = node.partition("::")
    test, _, values = rest.partition("[")
    *classes, test = test.split("::")
    return (
        ".".join([path.removesuffix(".py").replace("/", "."), *classes])
        + f"::{test}"
        + (f"[{values}" if values else "")
    )


def _ends(report: Path) -> list[tuple[str, str]]:
    """Every test of a report with how it ended: passed, skipped, failure or error."""
    if not report.exists():
        return []
    found = []
    for case in ET.parse(report).getroot().iter("testcase"):  # our own file
        ends = {child.tag for child in case} & {"skipped", "failure", "error"}
        name = re.sub(r"@\w+$", "", f"{case.get('classname')}::{case.get('name')}")
        found.append((name, min(ends, default="passed")))
    return found


def _broken(report: Path) -> tuple[str, ...]:
    """What failed and why, a line each: who sees only the end of the output is told, too."""
    if not report.exists():
        return ()
    cases = ET.parse(report).getroot().iter("testcase")  # our own file
    ends = [(case, end) for case in cases for end in case if end.tag in {"failure", "error"}]
    return tuple(
        f"{case.get('classname')}::{case.get('name')}: {' '.join((end.get('message') or end.tag).split())[:MESSAGE]}"
        for case, end in ends
    )


def _environment(parts: list[str]) -> dict[str, str]:
    """By the environment, because some tests run a pytest of their own."""
    unused = [f"-pno:{plugin}" for plugin, users in BYSTANDERS.items() if not users.intersection(parts)]
    asked = os.environ.get("PYTEST_ADDOPTS", "")
    folder = {} if DISKS.intersection(parts) else {"SEMEL_SERVERS_FOLDER": _machine().in_memory()}
    return {**folder, **os.environ, "PYTEST_ADDOPTS": " ".join([*unused, asked]).strip()}


def _machine() -> Any:
    """When the product is installed: help is there before."""
    return importlib.import_module("semel.testing.services.machine")


def _strict() -> bool:
    return os.environ.get("SEMEL_REQUIRE_SERVICES") == "1"


def _counts(report: Path) -> tuple[int, int, int]:
    if not report.exists():
        return 0, 0, 0
    suites = ET.parse(report).getroot().iter("testsuite")  # our own file
    total = failed = skipped = 0
    for suite in suites:
        total += int(suite.get("tests", 0))
        failed += int(suite.get("failures", 0)) + int(suite.get("errors", 0))
        skipped += int(suite.get("skipped", 0))
    return total - failed - skipped, failed, skipped


# -- coverage -------------------------------------------------------------------------------------------------------------
def _reset_coverage() -> None:
    shutil.rmtree(ROOT / ".coverage", ignore_errors=True)
    (ROOT / ".coverage").mkdir()


def _coverage(*, gate: bool) -> Row:
    """Of a complete run the thresholds are asked for; what a part alone covers is only told."""
    print("==== coverage", flush=True)
    start = time.monotonic()
    coverage = [sys.executable, "-m", "coverage"]
    told = str(RESULTS / "coverage.json")
    gates = [sys.executable, "scripts/coverage_gate.py", *([] if gate else ["--tell"]), told]
    steps = ([*coverage, "combine", "-q"], [*coverage, "json", "-q", "-o", told], gates)
    ok = all(subprocess.run(step, check=False).returncode == 0 for step in steps)
    note = "" if gate else "told only: the thresholds are for everything, with every server"
    return Row("coverage", ok, time.monotonic() - start, note=note)


# -- the end --------------------------------------------------------------------------------------------------------------
def _report(rows: list[Row], total: float) -> int:
    from semel.testing import services

    print(f"\n{'part':26}result   passed  failed  skipped  seconds")
    for row in rows:
        result = "ok" if row.ok else "FAILED"
        counts = f"{row.passed:8}{row.failed:8}{row.skipped:9}"
        print(f"{row.part:26}{result:7}{counts}{row.seconds:9.1f}  {row.note}")
    for row in rows:
        for test in row.unsteady:
            print(f"UNSTEADY, it failed among the others and passed without them; to be repaired: {test}")
    for test in [test for row in rows for test in row.broken][:MANY]:
        print(f"FAILED {test}")
    missing = services.missing()
    for remedy in missing.values():
        print(f"SERVER MISSING, its tests did not run: {remedy}")
    print(f"together{total:58.1f}")
    if total > BUDGET:
        print(f"over the budget of {BUDGET} s: {total:.0f} s")
    passed, failed, skipped = (
        sum(getattr(row, name) for row in rows) for name in ("passed", "failed", "skipped")
    )
    unsteady = sum(len(row.unsteady) for row in rows)
    if unsteady > FEW:
        print(f"FAILED: {unsteady} tests are unsteady, {FEW} may be")
    ok = all(row.ok for row in rows) and unsteady <= FEW
    if any(row.part not in {*LINTERS, "coverage"} for row in rows):
        print(f"{passed} passed, {failed} failed, {skipped} skipped")
    verdict = "everything passed" if not missing else f"what ran passed; without {', '.join(missing)}"
    print(verdict if ok else "FAILED: " + ", ".join([row.part for row in rows if not row.ok] or ["unsteady"]))
    return 0 if ok else 1


if __name__ == "__main__":
    sys.exit(main())
