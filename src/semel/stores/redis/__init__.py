"""Redis, Valkey, Sentinel and Cluster."""

from __future__ import annotations

from semel.stores.redis.store import RedisStore, adopt, open_url

__all__ = ["RedisStore", "adopt", "open_url"]
