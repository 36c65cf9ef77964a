"""The URL of a sink: where, as whom, and its options. Whatever is wrong with it is said without its password."""

from __future__ import annotations

import ssl
from collections.abc import Collection
from dataclasses import dataclass
from urllib.parse import parse_qsl, unquote

from semel.errors import ConfigurationError
from semel.hosts import ESCAPES, host_port, server_of, split

__all__ = ["Address", "needs"]


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
            raise ConfigurationError(f"a {parts.scheme}:// URL has its @ behind a question mark: {ESCAPES}")
        if unknown:
            raise ConfigurationError(
                f"{parts.scheme}:// sinks have no option {unknown[0]!r}; they have {', '.join(sorted(options))}"
            )
        host, number = server_of(parts, port)
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


def needs(package: str, extra: str) -> ConfigurationError:
    """What an import of a driver that is not there turns into."""
    return ConfigurationError(f'this sink needs {package}: pip install "semel[{extra}]" brings it')
