"""URLs of servers, of which some name several: `scheme://user:password@one:6379,[::1]:6379/path?option=value`.

`urlsplit` is made for one host, and each Python refuses more of what has brackets elsewhere than around all of it. So hosts are
taken off by hand where there may be several. Whatever is wrong with a URL is said without its password.
"""

from __future__ import annotations

import re
from typing import Final
from urllib.parse import SplitResult, urlsplit

from semel.errors import ConfigurationError

__all__ = ["ESCAPES", "apart", "host_port", "nodes_of", "scheme_of", "server_of", "split"]

_SEVERAL: Final = ("+cluster", "+sentinel")  # schemes whose URLs may name several servers
_HOSTS: Final = re.compile("[^/?#]*")
# What is said of a URL must not show what may be a piece of its password.
ESCAPES: Final = "in a user or a password write / as %2F, ? as %3F, # as %23, @ as %40, [ as %5B, ] as %5D"


def scheme_of(url: str) -> str:
    """What stands before the first colon, in small letters; nothing if it is no URL. Whatever the hosts are, it is found."""
    return urlsplit(url.partition("//")[0]).scheme


def split(url: str) -> SplitResult:
    """As urlsplit; of several hosts `netloc` has all of them. ConfigurationError if it cannot be meant."""
    scheme = url.partition("://")[0]
    if not scheme.endswith(_SEVERAL):
        return _split(url, scheme)
    parts = apart(url)
    login = parts.netloc.rpartition("@")[0]
    if "@" in login or "@" in parts.path or "@" in parts.fragment:
        raise ConfigurationError(
            f"a {scheme}:// URL has user and password once, in front of all hosts (user:password@one:6379,two:6379); {ESCAPES}"
        )
    return parts


def apart(url: str) -> SplitResult:
    """As urlsplit, whatever the hosts are: they are not looked at."""
    scheme, slashes, rest = url.partition("://")
    if not slashes:
        return _split(url, scheme)
    netloc = _HOSTS.match(rest)[0]  # type: ignore[index]  # it matches nothing, too
    return _split(f"{scheme}://{rest[len(netloc) :]}", scheme)._replace(netloc=netloc)


def _split(url: str, scheme: str) -> SplitResult:
    try:
        return urlsplit(url)
    except ValueError:  # whose text has the password in it
        raise ConfigurationError(
            f"the host in a {scheme}:// URL is no name and no address ([::1] with its brackets); {ESCAPES}"
        ) from None


def server_of(parts: SplitResult, default: int) -> tuple[str, int]:
    """The server's host and port, those of the first of several; no name at all is this machine."""
    if parts.scheme.endswith(_SEVERAL):
        return nodes_of(parts.netloc.rpartition("@")[2], default)[0]
    try:
        return parts.hostname or "localhost", _port(parts, default)
    except ValueError:
        raise ConfigurationError(
            f"the port in a {parts.scheme}:// URL is not a number from 1 to 65535; {ESCAPES}"
        ) from None


def nodes_of(hosts: str, default: int) -> list[tuple[str, int]]:
    """Servers that are named as `host:port,host:port`; no name at all is this machine."""
    found = []
    for number, each in enumerate(hosts.split(","), 1):
        try:
            parts = urlsplit(f"//{each.strip()}")
            host, port = parts.hostname, _port(parts, default)
        except ValueError:
            raise ConfigurationError(
                f"number {number} of the hosts in the URL is no host:port, with a port from 1 to 65535; {ESCAPES}"
            ) from None
        if not host and "," in hosts:
            raise ConfigurationError(
                f"number {number} of the hosts in the URL has no host: write host:port,host:port"
            )
        found.append((host or "localhost", port))
    return found


def _port(parts: SplitResult, default: int) -> int:
    """ValueError for what is none, as of a SplitResult itself, which takes 0."""
    port = default if parts.port is None else parts.port
    if port == 0:
        raise ValueError
    return port


def host_port(host: str, port: int) -> str:
    """As URLs have it."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
