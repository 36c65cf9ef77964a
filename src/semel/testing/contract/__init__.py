"""The contract of a store, as a test suite that ships. It tells whether a store of your own keeps its word::

    from semel.testing.contract import StoreContract

    class TestMyStore(StoreContract):
        def open(self):
            return MyStore("…")

That is all under pytest. The suite follows the store: its colour (a store of both colours is tested in both), its
`capabilities` (what it does not claim is not asked for), its clock. Stores with a private float `_skew`, added to their
clock, are moved through time by it; override `shift` when yours is moved otherwise. A store that cannot be moved
is tested with short leases and real waiting.

Every test takes a tenant of its own, so that one database serves the whole suite.
"""

from __future__ import annotations

import sys
from typing import Any

from semel.keys import Scope
from semel.store import Colour, Store

# pytest shows both sides of a failed assert only in modules that were named to it before their import.
if "pytest" in sys.modules:
    sys.modules["pytest"].register_assert_rewrite(
        *(
            f"{__name__}.{part}"
            for part in (
                "batches",
                "bench",
                "claims",
                "scanning",
                "settles",
                "takeovers",
                "values",
                "watching",
                "words",
            )
        )
    )

from semel.testing.contract.batches import BatchClauses, RaceClauses
from semel.testing.contract.bench import Bench, clause
from semel.testing.contract.claims import ClaimClauses
from semel.testing.contract.scanning import PurgeClauses, ScanClauses
from semel.testing.contract.settles import LeaseClauses, SettleClauses, StepClauses
from semel.testing.contract.takeovers import ReleaseClauses, TakeoverClauses
from semel.testing.contract.values import IdentityClauses, ValueClauses
from semel.testing.contract.watching import LifeClauses, WatchClauses
from semel.testing.contract.words import AuditClauses, ResolveClauses, UnreadableClauses

__all__ = ["Bench", "StoreContract", "clause"]

_SKEW = "_skew"


class StoreContract(
    ClaimClauses,
    TakeoverClauses,
    ReleaseClauses,
    SettleClauses,
    LeaseClauses,
    StepClauses,
    ResolveClauses,
    UnreadableClauses,
    AuditClauses,
    ValueClauses,
    IdentityClauses,
    BatchClauses,
    RaceClauses,
    WatchClauses,
    LifeClauses,
    ScanClauses,
    PurgeClauses,
):
    """Subclass it as `Test…` and say how a store is opened."""

    colour: Colour | None = None
    """The colour to test; None takes the store's own."""
    finds_refs = True
    """Whether `scan` finds records by ref (in Redis an index that is switched on)."""

    def open(self) -> Store:
        """A new store object on the same data each time (private data if it is not `shared`)."""
        raise NotImplementedError("a contract test class says how to open its store: override open()")

    def shift(self, store: Store, seconds: float) -> bool:
        """Move the store's clock forward; False when it cannot be moved."""
        inner: Any = store
        while not hasattr(inner, _SKEW) and hasattr(inner, "inner"):
            inner = inner.inner  # a layer has no clock of its own
        if not hasattr(inner, _SKEW):
            return False
        setattr(inner, _SKEW, getattr(inner, _SKEW) + seconds)
        return True

    def spoil(self, store: Store, scope: Scope) -> bool:
        """Damage the stored record so that it cannot be read, behind the store's back; False when you cannot."""
        del store, scope
        return False
