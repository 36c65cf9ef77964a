"""Any value as text, for messages that must not fail: on the way of a call a broken `__repr__` would take the place of the outcome."""

from __future__ import annotations

__all__ = ["said", "shown"]


def shown(value: object) -> str:
    """Its `repr`, or its class when that raises."""
    try:
        return repr(value)
    except Exception:  # noqa: BLE001 - whatever it is, there is something else to be told
        return f"<{type(value).__qualname__}>"


def said(error: BaseException) -> str:
    """What it says, or its class when that raises."""
    try:
        return str(error)
    except Exception:  # noqa: BLE001 - as above
        return f"<{type(error).__qualname__}>"
