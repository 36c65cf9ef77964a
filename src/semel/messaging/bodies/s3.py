"""Bodies in S3, or in what speaks its protocol: see `semel.bodies`."""

from __future__ import annotations

from semel.bodies.s3 import S3Bodies

__all__ = ["S3Bodies"]
