"""What the user gave to `exactly_once`, checked before anything runs: each refusal names the option and what to write."""

from __future__ import annotations

import inspect
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from collections.abc import Set as AbstractSet
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

from semel.errors import ConfigurationError
from semel.options import MIN_LEASE, count, seconds
from semel.testing.plugin_files import Places, real
from semel.testing.plugin_tries import Case
from semel.testing.plugin_windows import FAULTS, Fault

__all__ = ["checked", "checked_faults", "files_of", "name_of"]

_LEAST_PATIENCE = 0.1  # seconds: a process is forked in that time
_BY_KEY = "arguments=lambda key: (key,)"


def checked(
    *,
    run: Any,
    effects: Any,
    arguments: Any,
    reset: Any,
    expected: Any,
    lease: Any,
    also: Any,
    without: Any,
    patience: Any,
    lanes: Any,
) -> Case:
    if not hasattr(os, "fork"):
        raise ConfigurationError("exactly_once needs os.fork: run it on Linux or macOS")
    for name, given in (("the handler", run), ("effects", effects)):
        if not callable(given):
            raise ConfigurationError(f"exactly_once: {name} must be a function, not {given!r}")
    count("exactly_once: lanes", lanes, least=1)
    _check_reset(reset)
    made = _made(arguments, reset)
    return Case(
        run=run,
        arguments=made,
        effects=_of_key(effects, total=reset is not None),
        reset=reset,
        places=Places(
            named=frozenset(map(real, (*_own(run), *files_of("also", also)))),
            without=frozenset(map(real, files_of("without", without))),
        ),
        expected=count("exactly_once: expected", expected, least=1),
        lease=None if lease is None else seconds("exactly_once: lease", lease, least=MIN_LEASE),
        patience=seconds("exactly_once: patience", patience, least=_LEAST_PATIENCE),
    )


def _check_reset(reset: Any) -> None:
    if reset is not None and not (callable(reset) and _takes(reset)):
        raise ConfigurationError(
            f"exactly_once: reset must be a function without arguments that empties everything, not {reset!r}"
        )


def _made(arguments: Any, reset: Any) -> Callable[[str], Any]:
    if callable(arguments):
        if not _takes(arguments, "key"):
            raise ConfigurationError(
                f"exactly_once: arguments is given the key, and nothing else, and {arguments!r} does not take that: {_BY_KEY}"
            )
        return arguments  # type: ignore[no-any-return]
    if isinstance(arguments, Mapping | AbstractSet):
        raise ConfigurationError(f"exactly_once: arguments must be a tuple, not {arguments!r}: {_BY_KEY}")
    if reset is None:
        raise ConfigurationError(
            "exactly_once: the same arguments in every try would meet what the try before left behind: make them from the "
            "key, arguments=lambda key: (key, …), or give reset= a function that empties everything"
        )
    return lambda _: arguments


def _takes(given: Callable[..., Any], *arguments: object) -> bool:
    """Whether it can be called so. What does not say is believed."""
    try:
        inspect.signature(given).bind(*arguments)
    except TypeError:
        return False
    except ValueError:
        return True
    return True


def _of_key(effects: Callable[..., int], *, total: bool) -> Callable[[str], int]:
    try:
        takes_some = bool(inspect.signature(effects).parameters)
    except (TypeError, ValueError) as error:
        raise ConfigurationError(
            f"exactly_once: {effects!r} does not say whether it takes a key: give a function, effects=lambda key: …"
        ) from error
    if takes_some:
        if not _takes(effects, "key"):
            raise ConfigurationError(
                f"exactly_once: effects is given the key, and nothing else, and {effects!r} does not take that: effects=lambda key: …"
            )
        return effects
    if not total:
        raise ConfigurationError(
            f"exactly_once: {effects!r} takes no key, so that it counts the effects of other tries as well: count those of one key, "
            "effects=lambda key: …, or give reset= a function that empties everything"
        )
    return lambda _: effects()


def checked_faults(faults: Any) -> tuple[Fault, ...]:
    if isinstance(faults, str):
        raise ConfigurationError(f"exactly_once: faults is a list: faults=[{faults!r}]")
    chosen = tuple(faults) if isinstance(faults, Iterable) else ()
    if not chosen or any(fault not in FAULTS for fault in chosen):
        shown = repr(chosen if isinstance(faults, Iterable) else faults)
        raise ConfigurationError(f"exactly_once: faults are some of {', '.join(FAULTS)}, not {shown}")
    return tuple(dict.fromkeys(chosen))


# ------------------------------------------------------------------------------------------------- files
def _plain(run: Any) -> Any:
    while isinstance(run, partial):
        run = run.func
    if not inspect.isroutine(run) and not hasattr(run, "__wrapped__"):
        return type(run).__call__
    return run


def name_of(run: Any) -> str:
    plain = inspect.unwrap(_plain(run))
    return f"{plain.__module__}.{plain.__qualname__}"


def _own(run: Any) -> Iterator[str]:
    code = getattr(inspect.unwrap(_plain(run)), "__code__", None)
    if code is not None:
        yield code.co_filename


def files_of(option: str, modules: Any) -> Iterator[str]:
    if isinstance(modules, str | ModuleType):
        name = repr(modules) if isinstance(modules, str) else modules.__name__
        raise ConfigurationError(f"exactly_once: {option} is a list: {option}=[{name}]")
    if not isinstance(modules, Iterable):
        raise ConfigurationError(
            f"exactly_once: {option} is a list of modules, {option}=[shop], not {modules!r}"
        )
    for each in modules:
        yield _file(option, each)


def _file(option: str, module: Any) -> str:
    """The name that its code has; what has no lines would be passed over, and its windows be missing without a word."""
    if isinstance(module, str) and module not in sys.modules and Path(module).is_file():
        return os.path.abspath(module)  # noqa: PTH100 - Path.absolute leaves `..` in
    named = sys.modules.get(module) if isinstance(module, str) else module
    if isinstance(named, ModuleType) and named.__dict__.get("__file__"):
        return str(named.__file__)
    raise ConfigurationError(
        f"exactly_once: {option}={module!r} has no lines that could be windows: give an imported module of Python code, its name, or "
        "the path of its file"
    )
