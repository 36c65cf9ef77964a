"""Bodies as files of a folder that producers and consumers share: see `semel.bodies`."""

from __future__ import annotations

from semel.bodies.files import FileBodies

__all__ = ["FileBodies"]
