"""One private server process: started, paused, killed and restarted on the same port with the same data."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from pathlib import Path
from types import TracebackType
from typing import ClassVar, Self

from semel.errors import ConfigurationError
from semel.testing.services import home, watchdog

START_TIMEOUT = 30.0
STOP_TIMEOUT = 10.0


class ServerMissing(RuntimeError):
    """The server's program is not on this machine. The text names the package that brings it."""


class ServerFailed(RuntimeError):
    """The server did not start or did not answer in time. The text ends with its log."""


def find_program(*names: str, folders: tuple[str, ...] = (), remedy: str) -> str:
    """The path of the first program that is there. Debian keeps servers off an ordinary user's PATH."""
    search = os.pathsep.join(
        (*folders, os.environ.get("PATH", os.defpath), "/usr/local/bin", "/usr/sbin", "/usr/bin")
    )
    for name in names:
        path = shutil.which(name, path=search)
        if path:
            return path
    raise ServerMissing(f"{names[0]} is not on this machine; remedy: {remedy}")


def wait_until(
    ready: Callable[[], bool],
    *,
    timeout: float,
    what: str,
    log: Callable[[], str] = lambda: "",
    step: float = 0.01,
) -> None:
    """Ask `ready` until it is true. Raises ServerFailed, naming `what`, when `timeout` seconds have passed."""
    deadline = time.monotonic() + timeout
    while not ready():
        if time.monotonic() > deadline:
            raise ServerFailed(f"{what}: not within {timeout:g} s\n{log()}")
        time.sleep(step)


class Server(ABC):
    """A running server. Use it as a context manager, or call `close()`.

    Whatever happens to the launching process, the server ends with it (see `home`).
    """

    name: ClassVar[str]
    extra: ClassVar[str] = ""
    """The extra with the driver that `ping` needs; empty: none."""
    stop_signal: ClassVar[int] = signal.SIGTERM
    start_timeout: ClassVar[float] = START_TIMEOUT

    host = "127.0.0.1"

    def __init__(self, *, bus: bool = False) -> None:
        self.folder = home.new_folder(self.name)
        self._bus = bus
        self._process: subprocess.Popen[bytes] | None = None
        self._last_error: Exception | None = None
        self.choose_ports()

    # -- what each kind of server says ---------------------------------------------------------------------------
    @abstractmethod
    def argv(self) -> list[str]:
        """The command that runs the server in the foreground on `self.port`."""

    @abstractmethod
    def ping(self) -> None:
        """Run a real query. Raises anything while the server does not answer."""

    def prepare(self) -> None:  # noqa: B027 - some have nothing to make
        """Make the data folder; called once, before the first start."""

    def choose_ports(self) -> None:
        """Take free ports; called again when another process was quicker to listen on one of them."""
        self.port = home.free_port(bus=self._bus)

    # -- life ------------------------------------------------------------------------------------------------------
    @property
    def pid(self) -> int:
        """The process id of the server; raises ServerFailed when it is not running."""
        if self._process is None or self._process.poll() is not None:
            raise ServerFailed(f"{self.name} is not running; call start() or restart()")
        return self._process.pid

    @property
    def running(self) -> bool:
        """Whether the process is alive (a paused one is)."""
        return self._process is not None and self._process.poll() is None

    def open(self) -> Self:
        """First start. Another process may take the chosen port first: then another port is tried."""
        try:
            self.prepare()
            for _ in range(4):
                with contextlib.suppress(_PortTaken):
                    return self.start()
                self.choose_ports()
            return self.start()
        except BaseException:
            self.close()
            raise

    def start(self) -> Self:
        """Start on the same port with the same data and wait until a query is answered."""
        if self.running:
            return self
        self._log_path.write_bytes(b"")
        self._process = home.spawn(self.argv(), folder=self.folder, log=self._log_path)
        wait_until(self._answers, timeout=self.start_timeout, what=f"{self.name} start", log=self._why)
        return self

    def stop(self) -> None:
        """Ask the server to end and wait for it; kill it when it does not end by itself."""
        self._end(self.stop_signal)

    def kill(self) -> None:
        """SIGKILL: nothing is flushed, nothing is said to clients."""
        self._end(signal.SIGKILL)

    def restart(self) -> Self:
        """`stop()` unless it is down already, then `start()`: same port, same data."""
        self.stop()
        return self.start()

    def pause(self) -> None:
        """SIGSTOP to the server and its children: connections stay open, nothing is answered, from now on."""
        self._stop_running(self.pid)
        # PostgreSQL has a child for each connection. There will be no more of them: who would fork one stands still.
        for child in watchdog.inhabitants(self.folder):
            self._stop_running(child)

    def _stop_running(self, pid: int) -> None:
        with contextlib.suppress(ProcessLookupError):  # a child that has just ended
            os.kill(pid, signal.SIGSTOP)
        # One thread takes the signal and stops the others: until it has its turn, on a busy machine, they go on and answer.
        wait_until(
            lambda: _stands_still(pid), timeout=STOP_TIMEOUT, what=f"{self.name} stands still", step=0.001
        )

    def resume(self) -> None:
        """SIGCONT after `pause()`, to all of them."""
        os.kill(self.pid, signal.SIGCONT)
        watchdog.signal_all(self.folder, signal.SIGCONT)

    @contextlib.contextmanager
    def paused(self) -> Iterator[Self]:
        """`pause()` for the length of a block."""
        self.pause()
        try:
            yield self
        finally:
            self.resume()

    def close(self) -> None:
        """End the server and remove its data. May be called twice."""
        self.stop()
        shutil.rmtree(self.folder, ignore_errors=True)

    def log(self, *, lines: int = 40) -> str:
        """The end of what the server printed since its last start."""
        text = self._log_path.read_text("utf-8", "replace") if self._log_path.exists() else ""
        return "\n".join(text.splitlines()[-lines:])

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None, /
    ) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"<{self.name} {self.host}:{self.port} {'running' if self.running else 'down'}>"

    # -- inside ------------------------------------------------------------------------------------------------------
    @property
    def _log_path(self) -> Path:
        return self.folder / "server.log"

    def _answers(self) -> bool:
        if not self.running:
            text = self.log()
            if "ddress already in use" in text or "eaddrinuse" in text:
                raise _PortTaken(self.port)
            raise ServerFailed(f"{self.name} ended at once:\n{text}")
        try:
            self.ping()
        except ImportError as missing:
            raise ConfigurationError(
                f"a private {self.name} server is asked through the driver that semel uses, which is not here ({missing}): "
                f'pip install "semel[{self.extra}]"'
            ) from missing
        except Exception as error:  # noqa: BLE001  # each driver has its own errors for "not yet"
            self._last_error = error
            return False
        return True

    def _why(self) -> str:
        return f"the last query failed with: {self._last_error!r}\n{self.log()}"

    def _end(self, number: int) -> None:
        process, self._process = self._process, None
        if process is None:
            return
        process.send_signal(number)
        if (
            number != signal.SIGKILL
        ):  # a paused server would never see the request, nor its children what it asks of them
            watchdog.signal_all(self.folder, signal.SIGCONT)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(STOP_TIMEOUT)
        # What is left is a server that does not listen to reason, or its children (a backend, a background save):
        # they would hold the data folder against the next start.
        while watchdog.kill_all(self.folder):
            time.sleep(0.001)
        process.wait()


def _stands_still(pid: int) -> bool:
    """Whether no thread of a process runs; True where the system does not tell."""
    for stat in Path(f"/proc/{pid}/task").glob("*/stat"):
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # one that has ended
            if stat.read_text().rpartition(")")[2].split()[0] not in "TtXZ":
                return False
    return True


class _PortTaken(Exception):  # a branch of open(), not an error for anybody else
    pass
