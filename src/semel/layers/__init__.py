"""Behaviour around a store. Each layer is itself a store, so it works with every store and passes the same contract.

Order from the caller inwards (R31): observe › coalesce › cache › encrypt › retry › namespace › chaos › batch › store.
`semel.layers.encrypt` needs the extra "crypto" and is imported by its own name.
"""

from __future__ import annotations

from semel.layers.batch import Batch
from semel.layers.cache import Cache
from semel.layers.chaos import Chaos
from semel.layers.coalesce import Coalesce
from semel.layers.layer import Layer
from semel.layers.namespace import Namespace
from semel.layers.observe import Observe
from semel.layers.retry import Retry

__all__ = ["Batch", "Cache", "Chaos", "Coalesce", "Layer", "Namespace", "Observe", "Retry"]
