"""Django renders a template response after the view has returned and its middlewares have seen it: recorded then."""

from __future__ import annotations

from functools import partial
from typing import Any
from weakref import ref

from semel.http.guard import Guard
from semel.http.views import Look, recorded
from semel.run import Run, _current
from semel.runtime import run_sync

__all__ = ["Postponed"]


class Postponed:
    """The record of a plain view whose response is rendered later, by whoever has it then.

    Where it cannot be rendered, or never is because a middleware has put another one in its place, the view has had
    its effect all the same: that is kept, without a response.
    """

    def __init__(self, guard: Guard, run: Run, response: Any, look: Look) -> None:
        self._guard = guard
        self._run = run
        self._look = look
        self._status = look.status(response)
        # Known to the response only, and no circle: when nobody has that any more, it will not be rendered.
        response.render = partial(_render, self, ref(response))

    def render(self, response: Any) -> Any:
        token = _current.set(self._run.weak)
        try:
            made = response.render()
        except Exception:
            run_sync(self._guard.replaced(self._run, self._status))
            raise
        finally:
            _current.reset(token)
        return run_sync(recorded(self._guard, self._run, made, self._look))

    def __del__(self) -> None:
        if not self._run.settling:
            runtime = self._run._engine.runtime  # noqa: SLF001 - our own run
            runtime.background(self._guard.replaced(self._run, self._status))


def _render(postponed: Postponed, known: ref[Any]) -> Any:
    response = known()
    if response is None:
        raise ReferenceError("this response is gone, and what its view did is recorded without it")
    del response.render  # from here on it is its class's own again
    return postponed.render(response)
