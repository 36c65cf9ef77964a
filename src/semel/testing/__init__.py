"""Tools for testing with semel: real private servers, the store contract, faults."""

from __future__ import annotations
