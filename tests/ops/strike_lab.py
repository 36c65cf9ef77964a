"""A signal's handler that raises wherever Python looks for signals, one moment of a call after the other.

Not a storm: each moment is struck once, in turn, so that what fails fails always.
"""

from __future__ import annotations

import dis
import sys
import threading
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import cache
from types import CodeType, FrameType, FunctionType, ModuleType
from typing import Any, Final


class Struck(BaseException):
    """What the handler raises, as KeyboardInterrupt is."""


class Late(Exception):
    """What another one raises, as the soft time limit of a task queue is. Who catches errors of a driver may take it for one."""


def own_modules() -> list[ModuleType]:
    """Everything of ours that is loaded, but what is there for tests."""
    return [
        module
        for name, module in sys.modules.items()
        if name.startswith("semel.") and not name.startswith("semel.testing")
    ]


_LOOKS: Final = frozenset({"RESUME", "JUMP_BACKWARD", "CALL", "CALL_KW", "CALL_FUNCTION_EX"})


@cache
def moments(code: CodeType) -> Mapping[int, bool]:
    """Where Python looks for signals: when a function begins, a loop turns, a call has returned (True: if it was no Python code,
    which looks when it begins and not when it returns).

    The handler's error comes out of the instruction itself, ours out of the next one: not where another `except` is theirs.
    """
    found, before = dict[int, bool](), None
    regions: Any = dis._parse_exception_table(code)  # type: ignore[attr-defined]

    def guard(offset: int) -> int | None:
        return next((each.target for each in regions if each.start <= offset < each.end), None)

    for at in dis.get_instructions(code):
        name = "RESUME" if before is None else before.opname
        if name in _LOOKS and (before is None or guard(before.offset) == guard(at.offset)):
            found[at.offset] = name.startswith("CALL")
        before = at
    return found


class Handler:
    """Raises in the n-th moment of what is called, counted in the code of these modules only, or in these functions of it."""

    def __init__(
        self,
        moment: int,
        modules: Sequence[ModuleType],
        functions: Collection[str],
        error: type[BaseException] = Struck,
        spared: Collection[str] = (),
    ) -> None:
        self._left = moment
        self._spared = spared
        self._error = error
        self._modules = modules
        self._functions = functions
        self._callers: set[int] = set()
        self.where = ""

    def call(self, act: Callable[[], object]) -> bool:
        """Whether it raised."""
        with self._watching():
            try:
                act()
            except self._error:
                return True
            except Exception:
                if self._left > 0:
                    raise
        return self._left <= 0

    def _watching(self) -> AbstractContextManager[None]:
        watching = _by_monitoring if sys.version_info >= (3, 12) else _by_trace
        return watching(self._modules, self)

    def began(self, frame: FrameType) -> None:
        """Python code was called."""
        self._callers.add(id(frame.f_back))

    def passed(self, frame: FrameType, offset: int) -> None:
        code = frame.f_code
        called = id(frame) in self._callers
        self._callers.discard(id(frame))
        after_call = moments(code).get(offset)
        if after_call is None or (after_call and called):
            return
        if code.co_name not in self._spared and (not self._functions or code.co_name in self._functions):
            self._left -= 1
            if self._left == 0:
                self.where = f"{code.co_qualname}, {code.co_filename}:{frame.f_lineno}"
                raise self._error


@contextmanager
def _by_trace(modules: Sequence[ModuleType], handler: Handler) -> Iterator[None]:
    files = {module.__file__ for module in modules}

    def entered(frame: FrameType, *_: object) -> Callable[..., Any] | None:
        handler.began(frame)
        if frame.f_code.co_filename not in files:
            return None
        frame.f_trace_opcodes, frame.f_trace_lines = True, False
        return moved

    def moved(frame: FrameType, event: str, _: object) -> Callable[..., Any]:
        if event == "opcode":
            handler.passed(frame, frame.f_lasti)
        return moved

    before = sys.gettrace()
    sys.settrace(entered)
    try:
        yield
    finally:
        sys.settrace(before)


@contextmanager
def _by_monitoring(modules: Sequence[ModuleType], handler: Handler) -> Iterator[None]:
    """The way since 3.12, where a trace of opcodes has gaps."""
    watch: Any = getattr(sys, "monitoring")  # noqa: B009 - not there in 3.11
    tool, event, call = 4, watch.events.INSTRUCTION, watch.events.PY_START
    codes = [code for module in modules for code in _codes(module)]
    watch.use_tool_id(tool, "strikes")
    me = threading.get_ident()  # all threads are watched, and a signal strikes one

    def passed(_: object, offset: int) -> None:
        if threading.get_ident() == me:
            handler.passed(sys._getframe(1), offset)

    def began(*_: object) -> None:
        if threading.get_ident() == me:
            handler.began(sys._getframe(1))

    watch.register_callback(tool, event, passed)
    watch.register_callback(tool, call, began)
    watch.set_events(tool, call)
    for code in codes:
        watch.set_local_events(tool, code, event)
    try:
        yield
    finally:
        for code in codes:
            watch.set_local_events(tool, code, 0)
        watch.set_events(tool, 0)
        watch.register_callback(tool, event, None)
        watch.register_callback(tool, call, None)
        watch.free_tool_id(tool)


def _codes(module: ModuleType) -> list[CodeType]:
    """Of every function and method that is written there, and of those inside of them."""
    classes = [each for each in vars(module).values() if isinstance(each, type)]
    found = [fn for each in (module, *classes) for fn in vars(each).values() if isinstance(fn, FunctionType)]
    codes = [fn.__code__ for fn in found if fn.__code__.co_filename == module.__file__]
    for code in codes:
        codes += [each for each in code.co_consts if isinstance(each, CodeType)]
    return codes


def strike_each_moment(
    modules: Sequence[ModuleType],
    act: Callable[[], object],
    *,
    then: Callable[[], object],
    functions: Collection[str] = (),
    spared: Collection[str] = (),
    error: type[BaseException] = Struck,
    places: list[str] | None = None,
) -> int:
    """Until there is none left; how many there were. `then` is what must still be possible after each.

    `places` is told where each was. A place may be there twice: a call that does more than the one before it (a store that tidies
    up) has moments more, and those behind them come once again.
    """
    moment = 1
    while (handler := Handler(moment, modules, functions, error, spared)).call(act):
        if places is not None:
            places.append(handler.where)
        try:
            then()
        except BaseException as problem:
            problem.add_note(f"moment {moment} was struck: {handler.where}")
            raise
        moment += 1
    return moment - 1
