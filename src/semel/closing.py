"""What is closed at the end of a block: `with` and `async with` for what opens something, in both colours (R49)."""

from __future__ import annotations

import abc
from typing import Self

__all__ = ["Closeable"]


class Closeable(abc.ABC):
    """Both colours of one end."""

    @abc.abstractmethod
    def close(self) -> None:
        """Close what was opened here, as a plain call."""

    @abc.abstractmethod
    async def aclose(self) -> None:
        """As `close`, awaited."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()
