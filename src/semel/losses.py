"""That something was sent again, told to the flow: the copy whose answer was lost may still be on its way.

A connection that was reset may have left its request in the server's hands. The second copy is answered, the first one
arrives later: granted then, it would have no owner. Stores and layers that send a claim again say so here, and the flow
gives up such a nonce (`semel.debts`). It is told of the store as a whole, not of one call: between the two may be batches
and other layers, and a claim that is suspected for nothing costs a few releases of a key that it does not hold.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from semel.errors import ConfigurationError

if TYPE_CHECKING:
    from semel.store import Store

__all__ = ["Losses", "NotConnected", "is_unsent", "losses_of"]


class Losses:
    """`mark` is another object after each loss. Not a count: two threads that count at once may count back."""

    __slots__ = ("mark",)

    def __init__(self) -> None:
        self.mark = object()

    def tell(self) -> None:
        """A claim is sent again, or may be. Said before it is."""
        self.mark = object()


class NotConnected(ConfigurationError):
    """The server did not let us in (login, database, TLS): a connection that was not made carried nothing."""


def is_unsent(error: BaseException) -> bool:
    """Whether a call ended with that. Of a server that has let us in before it is told as StoreUnavailable, from that.

    What was sent before, on another connection, is told as a loss.
    """
    return isinstance(error, NotConnected) or isinstance(error.__cause__, NotConnected)


def losses_of(store: Store) -> Losses:
    """The losses that this store and all layers below it tell; new ones for a store that sends nothing again by itself."""
    losses: Losses | None = getattr(store, "losses", None)
    return Losses() if losses is None else losses
