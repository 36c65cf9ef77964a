"""How a refused value is named: `result.items[3]`. The path is built while the refusal travels up, so that the
accepted value, which is the rule, pays nothing for it.
"""

from __future__ import annotations

__all__ = ["MAX_DEPTH", "TOO_DEEP", "Refused", "key_step", "type_name"]

MAX_DEPTH = 64


class Refused(Exception):
    """A value that cannot be written; `at` is called by each container that it passes."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason
        self._steps: list[str] = []

    def at(self, step: str) -> Refused:
        self._steps.append(step)
        return self

    def explain(self, root: str) -> str:
        steps = self._steps[::-1]
        if len(steps) > 12:  # a value that contains itself would fill a screen
            steps = [*steps[:8], " … ", *steps[-2:]]
        return f"{root}{''.join(steps)} {self.reason}"


def key_step(key: object) -> str:
    """One step into a mapping. Long keys are cut: an error text may end up in a log."""
    text = repr(key)
    return f"[{text if len(text) <= 40 else text[:36] + '…'}]"


def type_name(cls: type) -> str:
    """`decimal.Decimal`, but `list`."""
    return cls.__qualname__ if cls.__module__ == "builtins" else f"{cls.__module__}.{cls.__qualname__}"


TOO_DEEP = f"is nested more than {MAX_DEPTH} levels deep, or contains itself: return a flatter value"
