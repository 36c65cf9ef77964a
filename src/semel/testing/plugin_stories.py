"""What to tell of an error that the user's code raised: their own lines and the causes, not what drivers and semel did meanwhile."""

from __future__ import annotations

import traceback
from collections.abc import Iterable, Iterator

import semel
from semel.testing.plugin_files import SEMEL, is_others

__all__ = ["story_of", "text_of", "told"]


def text_of(error: BaseException) -> str:
    try:
        return str(error)
    except Exception:  # noqa: BLE001 - it is the user's class
        return "(its text could not be made)"


def told(error: BaseException) -> str:
    return f"{type(error).__name__}: {text_of(error)}".rstrip(": ")


def story_of(error: BaseException) -> str:
    """The user's lines that led to it, and those of its causes. The error itself is told elsewhere."""
    lines = "\n".join(_lines_and_causes(error, text_of(error), set()))
    if lines or isinstance(error, semel.SemelError):
        return lines
    last = traceback.extract_tb(error.__traceback__)[-1:]  # a handler out of a library
    return "\n".join(_shown(frame for frame in last if not frame.filename.startswith(SEMEL)))


def _lines_and_causes(error: BaseException, known: str, seen: set[int]) -> Iterator[str]:
    seen.add(id(error))
    yield from _lines(error)
    behind = [*(error.exceptions if isinstance(error, BaseExceptionGroup) else ()), _cause(error)]
    for each in behind:
        if each is None or id(each) in seen:
            continue
        text, lines = text_of(each), [*_lines(each)]
        # A cause that the error has told already, and that no line of theirs raised, is an echo.
        if lines or text.partition("\n")[0] not in known:
            yield f"because of {told(each)}"
        yield from _lines_and_causes(each, f"{known}\n{text}", seen)


def _cause(error: BaseException) -> BaseException | None:
    return error.__cause__ or (None if error.__suppress_context__ else error.__context__)


def _lines(error: BaseException) -> Iterator[str]:
    frames = traceback.extract_tb(error.__traceback__)
    return _shown(frame for frame in frames if not is_others(frame.filename))


def _shown(frames: Iterable[traceback.FrameSummary]) -> Iterator[str]:
    for frame in frames:
        yield f'  File "{frame.filename}", line {frame.lineno}, in {frame.name}'
        if frame.line:
            yield f"    {frame.line}"
