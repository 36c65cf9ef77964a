"""Options of the Sentinels themselves in a URL: read as those of the servers are, or refused with the remedy."""

from __future__ import annotations

from typing import Any

import pytest

from semel.errors import ConfigurationError
from semel.runtime import run_sync
from semel.stores.redis.address import connection, read_target
from semel.testing import services
from tests.ops.redis_store_lab import finish, sync_store, win

pytestmark = pytest.mark.services


def sentinel_of(url: str) -> Any:
    target = read_target(url, "sync")
    return connection(target, target.seeds[0], "sync", connect_timeout=1.0, sentinel=True)


def test_options_of_sentinels_have_the_types_of_options_of_servers() -> None:
    theirs = sentinel_of(
        "rediss+sentinel://host/service?ssl_check_hostname=true&sentinel_ssl_check_hostname=false"
        "&sentinel_socket_keepalive=no&sentinel_username=ada&sentinel_password=a%2541%20b&sentinel_client_name="
    )
    assert theirs.check_hostname is False
    assert theirs.socket_keepalive is False
    assert (theirs.username, theirs.password, theirs.client_name) == ("ada", "a%41 b", None)
    assert sentinel_of("rediss+sentinel://host/service?ssl_check_hostname=false").check_hostname is False


@pytest.mark.parametrize(
    "query, told",
    [
        ("sentinel_db=0", "a Sentinel has no databases: remove sentinel_db"),
        ("sentinel_host=other", "options do not fit: remove 'sentinel_host'"),
        ("sentinel_nonsense=1", "options do not fit: remove 'sentinel_nonsense'"),
        ("sentinel_socket_connect_timeout=soon", "socket_connect_timeout"),
        ("sentinel_ssl_check_hostname=false", "options do not fit: .*ssl_check_hostname"),  # without TLS
    ],
)
def test_what_a_sentinel_cannot_do_is_refused_when_the_store_is_opened(query: str, told: str) -> None:
    with pytest.raises(ConfigurationError, match=told):
        read_target(f"redis+sentinel://host/service/0?{query}", "sync")


def test_real_sentinels_are_asked_with_their_options(redis_sentinel: services.RedisSentinel) -> None:
    url = f"{redis_sentinel.url}?sentinel_socket_keepalive=true&sentinel_client_name=guarded"
    with sync_store(url) as store:
        run_sync(finish(store, run_sync(win(store, "with options"))))
