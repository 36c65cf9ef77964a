"""What semel reads of a Redis URL itself; the rest is the driver's."""

from __future__ import annotations

from semel.errors import ConfigurationError

__all__ = ["own_options"]


def own_options(url: str) -> tuple[str, bool]:
    """The URL for the driver, and whether eviction is accepted."""
    address, _, query = url.partition("?")
    options = query.split("&") if query else []
    ours = [option for option in options if option.partition("=")[0] == "eviction"]
    if any(option != "eviction=accept" for option in ours):
        raise ConfigurationError(f"{ours[-1]!r} in the Redis URL: the only choice is eviction=accept")
    rest = "&".join(option for option in options if option not in ours)
    # A Valkey server speaks Redis's protocol; only the scheme's name differs.
    for theirs, common in (("valkeys", "rediss"), ("valkey", "redis")):
        if address.startswith((f"{theirs}:", f"{theirs}+")):
            address = common + address.removeprefix(theirs)
    return f"{address}?{rest}" if rest else address, bool(ours)
