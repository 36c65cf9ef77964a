"""HTTP webhooks: at least once, signed as Standard Webhooks says, one POST a message.

`https://shop.example/hooks/{topic}?secret_env=SHOP_SECRET`: the secret is read from that environment variable and taken off
the URL; other parameters stay. Each request has `webhook-id` and `Idempotency-Key` (the message's id, so that the other side
can tell a repetition), `webhook-timestamp` and `webhook-signature`.

| answer | what it means here |
|---|---|
| 2xx | delivered |
| 429, 502, 503, 504, none at all | the endpoint is away: nothing counts against a message; `Retry-After` is kept to |
| 410 | the endpoint is gone for good: it is disabled, its messages wait |
| any other | this message is rejected, the rest of its key waits |

An endpoint that is away for one message only, and takes those of other keys when it is tried again, rejects that message.
Five rejections by 5xx in a row, without a success, are an outage too: the endpoint is left alone for a while. With `{topic}`,
`{tenant}` or `{key}` in the URL each filled-in URL is an endpoint: one that is away stops what goes there, and nothing else.
"""

from __future__ import annotations

import asyncio
import base64
import binascii
import hashlib
import hmac
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from typing import Any, Final, Self
from urllib.parse import parse_qsl, quote, urlencode, urlsplit, urlunsplit

from semel.errors import ConfigurationError
from semel.messaging.sink import Guarantee, Rejected, Row, SinkUnavailable
from semel.messaging.sinks.address import needs
from semel.messaging.sinks.closing import Closing
from semel.messaging.sinks.envelope import filled, in_order, to_lines, waves
from semel.messaging.sinks.options import refuse_near_miss

try:
    import httpx
except ModuleNotFoundError as missing:  # pragma: no cover - needs an environment without it
    raise needs("httpx", "webhook") from missing

__all__ = ["WebhookSink", "sign"]

_AWAY: Final = {429, 502, 503, 504}
_GONE: Final = 410
_ANSWER: Final = 64 << 10  # read so much of an answer, to use its connection again
_IN_A_ROW: Final = 5
_OTHERS: Final = (
    2  # keys that are tried besides, to see whether it is the endpoint that is away or a message that is bad
)
_ENDPOINTS: Final = 10_000  # that are remembered although nothing is wrong with them
_KEPT: Final = 100  # connections that are kept open, to all endpoints together
_COOL_DOWN: Final = (30.0, 600.0)
_LONGEST: Final = 86_400.0
_SECRET: Final = "whsec_"  # noqa: S105  # the prefix, not a secret


def sign(secret: str, *, id: str, timestamp: int, body: bytes) -> str:  # noqa: A002  # the standard's own word
    """A signature of Standard Webhooks, version 1: `v1,` and the HMAC-SHA256 of id, time and body in base64."""
    text = b"%b.%d.%b" % (id.encode(), timestamp, body)
    return "v1," + base64.b64encode(hmac.digest(_key(secret), text, hashlib.sha256)).decode()


@dataclass(slots=True)
class _Circuit:
    """What is known about one endpoint. `slots` are the requests that it may have at a time, of all parts together."""

    url: str
    slots: asyncio.Semaphore
    failures: int = 0
    until: float = 0.0
    cool_down: float = _COOL_DOWN[0]
    gone: bool = False
    outages: int = 0  # so far: who waited for a slot while one began does not knock
    away: bool = False

    def check(self, now: float) -> None:
        if self.gone:
            raise self.unavailable(
                "answered 410 Gone and is disabled; its messages wait. Correct or remove its route, or call enable() on the sink",
                seconds=3600,
            )
        if now < self.until:
            raise self.unavailable(f"failed {self.failures} times in a row", seconds=self.until - now)

    def unavailable(self, why: str, *, seconds: float | None = None) -> SinkUnavailable:
        where = _shown(self.url)
        return SinkUnavailable(f"{where} {why}", seconds=seconds, endpoint=where)

    @property
    def well(self) -> bool:
        return not (self.failures or self.gone or self.away or self.slots.locked())

    def missed(self) -> None:
        self.outages, self.away = self.outages + 1, True

    def worked(self) -> None:
        self.failures, self.until, self.cool_down, self.away = 0, 0.0, _COOL_DOWN[0], False

    def failed(self, now: float) -> None:
        self.failures += 1
        if self.failures >= _IN_A_ROW:
            self.until = now + self.cool_down
            self.cool_down = min(self.cool_down * 2, _COOL_DOWN[1])


# Headers that belong to the connection, or to us: a message that carries copies of its request's would break its own. Nor do
# credentials of whoever made that request leave the house; those for the endpoint are the client's.
_OURS: Final = frozenset(
    {
        "connection", "content-length", "host", "keep-alive", "te", "trailer", "transfer-encoding", "upgrade",
        "authorization", "cookie", "proxy-authorization", "set-cookie", "content-type", "idempotency-key", "webhook-id", "webhook-timestamp", "webhook-signature",
    }
)  # fmt: skip


class WebhookSink(Closing):
    """Posts each message. `secrets` are `whsec_…` keys; with several the request carries a signature of each (rotation).

    `concurrency` messages of different keys are under way at a time, to each endpoint. `client` is an `httpx.AsyncClient` of your own, which is
    not closed here. Redirects are not followed.
    """

    guarantee: Guarantee = "at-least-once"
    numbered = False

    def __init__(
        self,
        url: str,
        *,
        secrets: Sequence[str] = (),
        timeout: float = 15.0,
        concurrency: int = 8,
        client: httpx.AsyncClient | None = None,
        clock: Callable[[], float] = time.time,
    ) -> None:
        if urlsplit(url).scheme not in {"http", "https"} or not urlsplit(url).hostname:
            raise ConfigurationError("a webhook needs an http:// or https:// URL with a host")
        for secret in secrets:
            _key(secret)
        self._url = url
        self._secrets = tuple(secrets)
        self._timeout = timeout
        self._concurrency = concurrency
        self._given = client
        self._client = client
        self._clock = clock
        self._loop: asyncio.AbstractEventLoop | None = None
        self._slots_of: asyncio.AbstractEventLoop | None = None
        self._circuits: dict[str, _Circuit] = {}
        self.splits = tuple(name for name in ("topic", "tenant", "key") if f"{{{name}}}" in url)

    @classmethod
    def from_url(cls, url: str) -> Self:
        """From `https://…?secret_env=NAME`: the variable holds one secret, or several with spaces between."""
        parts = urlsplit(url)
        options = parse_qsl(parts.query, keep_blank_values=True)
        names = [value for name, value in options if name == "secret_env"]
        for name, _ in options:
            refuse_near_miss(
                name, "secret_env", "as it is it goes to the endpoint, and requests may be unsigned"
            )
        secrets: list[str] = []
        for name in names:
            secrets += _from_environment(name)
        if names:
            rest = urlencode([(name, value) for name, value in options if name != "secret_env"])
            url = urlunsplit(parts._replace(query=rest))
        return cls(url, secrets=secrets)

    def lane(self, row: Row) -> str:
        """One endpoint at a time."""
        return filled(self._url, row, escape=_escaped) if "{" in self._url else ""

    def enable(self) -> None:
        """Try endpoints again that answered 410 or failed too often."""
        self._circuits.clear()

    async def publish(self, part: int, epoch: int, batch: int, rows: Sequence[Row]) -> int | None:
        """Post the rows. Rejected names those that the endpoint refused, and what it took."""
        del part, epoch, batch  # it keeps no numbers: ids tell repetitions apart
        circuit = self._circuit(filled(self._url, rows[0], escape=_escaped))
        circuit.check(time.monotonic())
        call = _Call(delivered=set(), reasons={}, stopped=set(), doubts=[], probing=circuit.away)
        for wave in waves(rows):
            todo = in_order(wave, call.stopped)
            while todo:
                many = 1 if circuit.failures or circuit.away else self._concurrency
                some, todo = todo[:many], todo[many:]
                results = await asyncio.gather(*(self._post(circuit, row) for row in some))
                away = call.note(some, results, circuit)
                if away is not None:
                    call.end(away)
        if call.doubts:
            call.end(call.doubts[-1][1])
        if call.reasons:
            raise Rejected(call.reasons, delivered=call.delivered)
        return None

    def _circuit(self, url: str) -> _Circuit:
        loop = asyncio.get_running_loop()
        if self._slots_of is not loop:
            self._slots_of = loop
            for circuit in self._circuits.values():
                circuit.slots = asyncio.Semaphore(self._concurrency)
        known = self._circuits.get(url)
        if known is None:
            if len(self._circuits) >= _ENDPOINTS:
                self._circuits = {name: one for name, one in self._circuits.items() if not one.well}
            known = self._circuits[url] = _Circuit(url, asyncio.Semaphore(self._concurrency))
        return known

    async def _post(self, circuit: _Circuit, row: Row) -> httpx.Response | str | SinkUnavailable:
        """The answer; text if the message cannot even be sent; SinkUnavailable if nobody answered."""
        lines = to_lines(row)
        if isinstance(lines, str):
            return lines
        now = int(self._clock())
        lines = {name: line for name, line in lines.items() if name.lower() not in _OURS}
        lines |= {
            "content-type": "application/octet-stream" if row.raw else "application/json",
            "idempotency-key": quote(row.id, safe="!#$&'()*+,-./:;<=>?@[]^_`{|}~"),
            "webhook-id": quote(row.id, safe="!#$&'()*+,-./:;<=>?@[]^_`{|}~"),
            "webhook-timestamp": str(now),
        }
        if self._secrets:
            signed = {"id": lines["webhook-id"], "timestamp": now, "body": row.body}
            lines["webhook-signature"] = " ".join(sign(secret, **signed) for secret in self._secrets)  # type: ignore[arg-type]  # the keywords of `sign`, by their names
        before = circuit.outages
        async with circuit.slots:
            if circuit.outages != before:
                return circuit.unavailable("did not answer those before")
            return await self._answer(circuit, row, lines)

    async def _answer(
        self, circuit: _Circuit, row: Row, lines: dict[str, str]
    ) -> httpx.Response | str | SinkUnavailable:
        client, answer = self._connected(), None
        # httpx bounds each step of its own: an endpoint that drips would be listened to for days.
        bound = asyncio.timeout(self._timeout if self._given is None else None)
        try:
            async with bound, client.stream("POST", circuit.url, content=row.body, headers=lines) as answer:
                bound.reschedule(asyncio.get_running_loop().time() + self._timeout)
                read = 0
                async for chunk in answer.aiter_raw():
                    read += len(chunk)
                    if read > _ANSWER:
                        break
                return answer
        except TimeoutError:
            if answer is not None:  # it has said what became of the message; the rest nobody needs
                return answer
            circuit.missed()
            return circuit.unavailable(f"did not answer within {self._timeout:g} s")
        except httpx.LocalProtocolError as error:
            return f"it cannot be sent: {error}"
        except (httpx.HTTPError, httpx.InvalidURL, OSError) as error:
            circuit.missed()
            return circuit.unavailable(f"did not answer: {str(error) or type(error).__name__}")

    # -------------------------------------------------------------------------------------- connection
    def _connected(self) -> httpx.AsyncClient:
        loop = asyncio.get_running_loop()
        if self._client is None or (self._given is None and self._loop is not loop):
            self._loop = loop
            self._client = httpx.AsyncClient(
                timeout=self._timeout,
                follow_redirects=False,
                # How many an endpoint has is bounded by its slots: with a bound here one that hangs would have them all.
                limits=httpx.Limits(max_connections=None, max_keepalive_connections=_KEPT),
                headers={"user-agent": "semel"},
            )
        return self._client

    async def aclose(self) -> None:
        """Close the connections that were opened here."""
        if self._given is None and self._client is not None and self._loop is asyncio.get_running_loop():
            client, self._client = self._client, None
            await client.aclose()


@dataclass(slots=True)
class _Call:
    """What one call of `publish` has brought about so far."""

    delivered: set[str]
    reasons: dict[str, str]
    stopped: set[tuple[str, str]]
    doubts: list[
        tuple[Row, SinkUnavailable]
    ]  # those that met an outage, while it is not clear whose fault that is
    probing: bool  # the endpoint was away already

    def note(self, rows: Sequence[Row], results: Sequence[Any], circuit: _Circuit) -> SinkUnavailable | None:
        """Sort the answers; returns what ends the call, if anything does."""
        away: SinkUnavailable | None = None
        now = time.monotonic()
        for row, result in zip(rows, results, strict=True):
            if isinstance(result, SinkUnavailable):
                away = self._doubt(row, result)
            elif isinstance(result, str):
                self._reject(row, result)
            elif result.is_success:
                circuit.worked()
                self.delivered.add(row.id)
                self._settle()
            elif result.status_code in _AWAY:
                circuit.missed()
                away = self._doubt(row, circuit.unavailable(_told(result), seconds=_retry_after(result)))
            elif result.status_code == _GONE:
                circuit.gone = True
            else:
                self._reject(row, f"{_shown(circuit.url)} {_told(result)}")
                if result.is_server_error:
                    circuit.failed(now)
        if away is None and (circuit.gone or circuit.until > now):
            try:
                circuit.check(now)
            except SinkUnavailable as error:
                return error
        return away

    def _doubt(self, row: Row, error: SinkUnavailable) -> SinkUnavailable | None:
        """An outage, or a message that the endpoint falls over: where it was away before, another key is tried to tell."""
        self.doubts.append((row, error))
        if row.key is not None:
            self.stopped.add((row.tenant, row.key))
        return None if self.probing and len(self.doubts) <= _OTHERS else error

    def _settle(self) -> None:
        """It takes others: then those that it did not take are to blame."""
        for row, error in self.doubts if self.probing else ():
            self._reject(row, f"{error}, and takes others")
        self.doubts.clear()

    def _reject(self, row: Row, reason: str) -> None:
        self.reasons[row.id] = reason
        if row.key is not None:
            self.stopped.add((row.tenant, row.key))

    def end(self, away: SinkUnavailable) -> None:
        """What was delivered or refused is told first; the next call meets the outage."""
        if not self.delivered and not self.reasons:
            raise away
        raise Rejected(self.reasons, delivered=self.delivered) from away


def _told(answer: httpx.Response) -> str:
    return f"answered {answer.status_code} {answer.reason_phrase}".rstrip()


def _shown(url: str) -> str:
    """For messages: no user, no password, no parameters."""
    parts = urlsplit(url)
    return f"{parts.scheme}://{parts.hostname}{f':{parts.port}' if parts.port else ''}{parts.path}"


def _retry_after(answer: httpx.Response) -> float | None:
    text = answer.headers.get("retry-after", "").strip()
    if text.isascii() and text.isdigit():
        return min(float(text), _LONGEST)
    try:
        when = parsedate_to_datetime(text)
    except (ValueError, OverflowError):
        return None
    when = when if when.tzinfo else when.replace(tzinfo=UTC)
    return min(max((when - datetime.now(UTC)).total_seconds(), 0.0), _LONGEST)


def _escaped(value: str) -> str:
    return quote(value, safe="")


def _from_environment(name: str) -> list[str]:
    found = os.environ.get(name, "").split()
    if not found:
        raise ConfigurationError(
            f"the webhook's secret is to come from the environment variable {name!r}, which is not set; "
            "set it to a key that begins with whsec_"
        )
    return found


def _key(secret: str) -> bytes:
    try:
        if secret.startswith(_SECRET):
            return base64.b64decode(secret.removeprefix(_SECRET), validate=True)
    except binascii.Error:
        pass
    raise ConfigurationError(
        "a webhook's secret is whsec_ followed by base64; this one is not (it is not shown here)"
    )
