"""The URL of a sink: where, as whom, and its options. Whatever is wrong with it is said without its password."""

from __future__ import annotations

import re
import ssl
from collections.abc import Collection
from dataclasses import dataclass
from typing import Final
from urllib.parse import SplitResult, parse_qsl, unquote, urlsplit

from semel.errors import ConfigurationError

__all__ = ["Address", "host_port", "needs", "nodes_of", "split"]

_SEVERAL: Final = "+cluster"  # schemes whose URLs may name several servers
_HOSTS: Final = re.compile("[^/?#]*")
# What is said of a URL must not show what may be a piece of its password.
_ESCAPES: Final = "in a user or a password write / as %2F, ? as %3F, # as %23, @ as %40"


@dataclass(frozen=True, slots=True)
class Address:
    """A URL taken apart."""

    scheme: str
    host: str
    port: int
    path: str
    user: str | None
    password: str | None
    options: dict[str, str]

    @classmethod
    def of(cls, url: str, *, port: int, options: Collection[str]) -> Address:
        """Take `url` apart. An option that is not among `options` raises, naming them."""
        parts = split(url)
        given = dict(parse_qsl(parts.query, keep_blank_values=True))
        unknown = sorted(given.keys() - set(options))
        if unknown and "@" in unknown[0]:
            raise ConfigurationError(f"a {parts.scheme}:// URL has its @ behind a question mark: {_ESCAPES}")
        if unknown:
            raise ConfigurationError(
                f"{parts.scheme}:// sinks have no option {unknown[0]!r}; they have {', '.join(sorted(options))}"
            )
        host, number = _server(parts, port)
        return cls(
            scheme=parts.scheme,
            host=host,
            port=number,
            path=unquote(parts.path.removeprefix("/")),
            user=unquote(parts.username) if parts.username else None,
            password=unquote(parts.password) if parts.password else None,
            options=given,
        )

    @property
    def name(self) -> str:
        """For messages: no user, no password."""
        return host_port(self.host, self.port)

    def text(self, option: str, default: str) -> str:
        """An option, or its default."""
        return self.options.get(option) or default

    def number(self, option: str, default: float) -> float:
        """An option that is a number above 0."""
        text = self.options.get(option)
        if not text:
            return default
        try:
            number = float(text)
        except ValueError:
            number = 0.0
        if not number > 0:
            raise ConfigurationError(f"{option}={text} in a {self.scheme}:// URL: a number above 0 is needed")
        return number

    def flag(self, option: str, *, default: bool) -> bool:
        """An option that is yes or no."""
        text = self.options.get(option, "yes" if default else "no").lower()
        if text not in {"yes", "no", "true", "false", "1", "0"}:
            raise ConfigurationError(f"{option}={text} in a {self.scheme}:// URL: yes or no is needed")
        return text in {"yes", "true", "1"}

    def tls(self, *schemes: str) -> ssl.SSLContext | None:
        """The machine's own trust, if the scheme is one of those that ask for TLS."""
        return ssl.create_default_context() if self.scheme in schemes else None


def split(url: str) -> SplitResult:
    """As urlsplit, which may refuse brackets ([::1]) in the middle of several hosts; ConfigurationError if it cannot be meant."""
    scheme, _, rest = url.partition("://")
    if not scheme.endswith(_SEVERAL):
        return _split(url, scheme)
    netloc = _HOSTS.match(rest)[0]  # type: ignore[index] # it matches nothing, too
    parts = _split(f"{scheme}://{rest[len(netloc) :]}", scheme)._replace(netloc=netloc)
    login = netloc.rpartition("@")[0]
    if "@" in login or "@" in parts.path or "@" in parts.fragment:
        raise ConfigurationError(
            f"a {scheme}:// URL has user and password once, in front of all hosts (user:password@one:6379,two:6379); {_ESCAPES}"
        )
    return parts


def _split(url: str, scheme: str) -> SplitResult:
    try:
        return urlsplit(url)
    except ValueError:  # whose text has the password in it
        raise ConfigurationError(
            f"the host in a {scheme}:// URL is no name and no address ([::1] with its brackets); {_ESCAPES}"
        ) from None


def _server(parts: SplitResult, default: int) -> tuple[str, int]:
    """The server, the first of several."""
    if parts.scheme.endswith(_SEVERAL):
        return nodes_of(parts.netloc.rpartition("@")[2], default)[0]
    try:
        return parts.hostname or "localhost", parts.port or default
    except ValueError:
        raise ConfigurationError(f"the port in a {parts.scheme}:// URL is not a number; {_ESCAPES}") from None


def nodes_of(hosts: str, default: int) -> list[tuple[str, int]]:
    """Servers that are named as `host:port,host:port`; no name at all is this machine."""
    found = []
    for number, each in enumerate(hosts.split(","), 1):
        try:
            parts = urlsplit(f"//{each.strip()}")
            host, port = parts.hostname, parts.port
        except ValueError:
            raise ConfigurationError(
                f"number {number} of the hosts in the URL is no host:port; {_ESCAPES}"
            ) from None
        if not host and "," in hosts:
            raise ConfigurationError(
                f"number {number} of the hosts in the URL has no host: write host:port,host:port"
            )
        found.append((host or "localhost", port or default))
    return found


def host_port(host: str, port: int) -> str:
    """As URLs have it."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def needs(package: str, extra: str) -> ConfigurationError:
    """What an import of a driver that is not there turns into."""
    return ConfigurationError(f'this sink needs {package}: pip install "semel[{extra}]" brings it')
