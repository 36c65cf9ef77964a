"""Whether a face may still be used. Its engines, those of its transactions and claims by hand look at the same door."""

from __future__ import annotations

from semel.errors import ConfigurationError

__all__ = ["Door"]


class Door:
    __slots__ = ("_name", "closed")

    def __init__(self, name: str) -> None:
        self._name = name
        self.closed = False

    def check(self) -> None:
        """Raises ConfigurationError once it is closed."""
        if self.closed:
            raise ConfigurationError(f"this {self._name} is closed: make a new one, or close it later")
