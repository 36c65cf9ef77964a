"""R31: what `cache=` holds goes by itself, subscriptions and all, whether or not anybody calls again."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import redis

from semel.layers.cache import Cache
from semel.stores.memory import MemoryStore

from .conftest import Lab, url_of
from .test_failure import _over
from .tools import until

MANY = 20


@pytest.fixture
def lab(request: pytest.FixtureRequest, colour: str, tmp_path: Path) -> Lab:
    """Redis: its subscriptions can be counted."""
    return Lab(colour, url_of(request, "redis", colour, tmp_path))


def cache_of(once: Any) -> Cache:
    layer = once._engine().store
    while not isinstance(layer, Cache):
        layer = layer.inner
    return layer


async def replayed(lab: Lab, once: Any) -> Cache:
    """Every outcome once more: from then on it is cached."""
    for _ in range(2):
        for number in range(MANY):
            await lab.do(once.execute(f"k{number}", lab.effect(number)))
    assert len(lab.effects) == MANY
    return cache_of(once)


class Heard:
    """The subscriptions that are for these keys, as the server counts them."""

    def __init__(self, url: str, keys: set[bytes]) -> None:
        self._client: Any = redis.Redis.from_url(url)
        self._keys = tuple(keys)

    def __len__(self) -> int:
        channels = self._client.execute_command("PUBSUB", "SHARDCHANNELS")
        return sum(channel.endswith(self._keys) for channel in channels)


async def test_R31_what_nobody_asks_for_again_leaves_the_cache_and_its_subscription(lab: Lab) -> None:
    cache = await replayed(lab, lab.face(cache=100))
    heard = Heard(lab.url, set(cache._entries))
    assert 0 < len(heard) <= MANY
    await until(lab, lambda: not cache._entries and not len(heard), within=10)


async def test_R31_a_face_that_is_closed_leaves_nothing_of_its_cache(light_lab: Lab) -> None:
    once = _over(light_lab, MemoryStore(), cache=100)
    cache = await replayed(light_lab, once)
    await light_lab.do(once.close())
    await until(light_lab, lambda: not cache._entries, within=10)


async def test_R31_closing_a_face_empties_its_cache_at_once(lab: Lab) -> None:
    once = lab.face(cache=100)
    cache = await replayed(lab, once)
    heard = Heard(lab.url, set(cache._entries))
    assert cache._entries
    await lab.do(once.close() if lab.colour == "sync" else once.aclose())
    assert not cache._entries
    await until(lab, lambda: not len(heard), within=10)
