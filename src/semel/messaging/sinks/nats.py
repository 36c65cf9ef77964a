"""NATS JetStream: exact within the stream's duplicate window, and fenced.

`nats://user:password@host:4222?stream=ORDERS&subject=orders.{topic}` (`tls://` for TLS). JetStream drops a message whose
`Nats-Msg-Id` it has seen in the window (two minutes by default), and that is all that stands between a batch that was cut in
the middle and its repetition. Whole batches are told apart for ever: behind each one a marker with its number is written to
a subject of the part, in the same stream, on the condition that nobody else has written there since it was read. So a relay
that was overtaken is refused, and a stream that lost its end has lost the marker too.

The marker's subjects are `semel.frontier.STREAM.>`; a stream that exists already must have them among its subjects. Consumers
that read a whole stream, without a filter, see the markers.
"""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Sequence
from typing import Any, Final, NamedTuple, Self

import msgspec

from semel.errors import ConfigurationError
from semel.messaging.pauses import unless
from semel.messaging.sink import Fenced, Guarantee, Rejected, Row, SinkUnavailable
from semel.messaging.sinks.address import Address, needs
from semel.messaging.sinks.closing import Closing, shut
from semel.messaging.sinks.envelope import ID, filled, to_lines

try:
    from nats.aio.client import Client
    from nats.errors import AuthorizationError, Error, NoRespondersError, NoServersError
    from nats.js.api import StreamConfig
    from nats.js.errors import APIError, BadRequestError, NotFoundError
except ModuleNotFoundError as missing:  # pragma: no cover - needs an environment without it
    raise needs("nats-py", "nats") from missing

__all__ = ["NatsSink"]

_TRIES: Final = 3
_WRONG_SEQUENCE: Final = 10071
_UNFIT: Final = re.compile(r"[\s*>]")  # what a subject must not contain; dots part it
_UNFIT_TOKEN: Final = re.compile(r"[\s*>.]")


class _Marker(msgspec.Struct):
    """What stands on a part's marker subject: who wrote last, and which batch is complete."""

    epoch: int = 0
    batch: int = 0


class _Letter(NamedTuple):
    subject: str
    headers: dict[str, str]
    body: bytes


class _Found(NamedTuple):
    marker: _Marker
    seq: int


class NatsSink(Closing):
    """Publishes into a stream, which is made when it is not there (`create=no` leaves that to you).

    `window` is the duplicate window of a stream that is made here, in seconds. `timeout` bounds each call.
    """

    guarantee: Guarantee = "window"

    def __init__(
        self,
        url: str,
        stream: str,
        subject: str | None = None,
        *,
        timeout: float = 5.0,
        create: bool = True,
        window: float = 120.0,
    ) -> None:
        self._address = Address.of(url, port=4222, options=())
        if not stream or _UNFIT_TOKEN.search(stream):
            raise ConfigurationError(
                f"a JetStream stream needs a name without dots, spaces, * and >, not {stream!r}"
            )
        self.stream = stream
        self.subject = subject or f"{stream}.{{topic}}"
        self._timeout = timeout
        self._create = create
        self._window = window
        self._token = "semel"  # noqa: S105  # of a subject
        self._client: Client | None = None
        self._gone: asyncio.Future[None]  # done when the connection has ended; made with it
        self._loop: asyncio.AbstractEventLoop | None = None
        self._opening = asyncio.Lock()
        self._config: StreamConfig | None = None

    @classmethod
    def from_url(cls, url: str) -> Self:
        """From `nats://…?stream=NAME&subject=TEMPLATE&timeout=5&create=no&window=120`."""
        names = ("stream", "subject", "timeout", "create", "window")
        address = Address.of(url, port=4222, options=names)
        if not address.options.get("stream"):
            raise ConfigurationError(
                "a nats:// sink needs ?stream=NAME, the JetStream stream that keeps the messages"
            )
        return cls(
            url.partition("?")[0],
            address.options["stream"],
            address.options.get("subject"),
            timeout=address.number("timeout", 5.0),
            create=address.flag("create", default=True),
            window=address.number("window", 120.0),
        )

    def bind(self, source: str) -> None:
        """Who publishes: two outboxes that write to one stream have markers of their own."""
        self._token = _token(source)

    async def publish(self, part: int, epoch: int, batch: int, rows: Sequence[Row]) -> int | None:
        """Publish the rows, then the marker with their number; the number that was there."""
        try:
            async with asyncio.timeout(self._timeout):
                client = await self._connected()
                return await unless(self._gone, self._publish(client, part, _Marker(epoch, batch), rows))
        except AuthorizationError as error:
            await self._forget()
            raise self._refused(error) from error
        except (Error, APIError, OSError, TimeoutError) as error:
            await self._forget()
            reason = str(error) or type(error).__name__
            raise SinkUnavailable(f"NATS at {self._address.name} did not take the batch: {reason}") from error

    async def _publish(self, client: Client, part: int, next_one: _Marker, rows: Sequence[Row]) -> int:
        found = await self._own(client, part, next_one.epoch)
        if found.marker.batch == next_one.batch - 1:
            letters = self._letters(
                client, rows
            )  # raises Rejected before anything is written, and never what is in
            await self._send(client, letters)
            await self._mark(client, part, next_one, found.seq)
        return found.marker.batch

    # -------------------------------------------------------------------------------------- the frontier
    async def _own(self, client: Client, part: int, epoch: int) -> _Found:
        """The marker, with this epoch on it: from here on an overtaken relay is refused."""
        for _ in range(_TRIES):
            found = await self._read(client, part)
            if found.marker.epoch > epoch:
                raise self._fenced(part, epoch, found.marker.epoch)
            if found.marker.epoch == epoch:
                return found
            try:
                mine = _Marker(epoch, found.marker.batch)
                return _Found(mine, await self._write(client, part, mine, found.seq))
            except BadRequestError as error:
                if error.err_code != _WRONG_SEQUENCE:
                    raise
        raise SinkUnavailable(f"others write the marker of part {part} in {self.stream!r} all the time")

    async def _read(self, client: Client, part: int) -> _Found:
        try:
            message = await client.jetstream(timeout=self._timeout).get_last_msg(
                self.stream, self._place(part)
            )
        except NotFoundError as error:
            if error.err_code == 10059:  # the stream itself is gone
                raise
            return _Found(_Marker(), 0)
        return _Found(msgspec.json.decode(message.data or b"{}", type=_Marker), message.seq or 0)

    async def _mark(self, client: Client, part: int, marker: _Marker, seq: int) -> None:
        try:
            await self._write(client, part, marker, seq)
        except BadRequestError as error:
            if error.err_code != _WRONG_SEQUENCE:
                raise
            found = await self._read(client, part)
            raise self._fenced(part, marker.epoch, found.marker.epoch) from error

    async def _write(self, client: Client, part: int, marker: _Marker, seq: int) -> int:
        headers = {"Nats-Expected-Last-Subject-Sequence": str(seq)}
        if self._config is not None and self._config.allow_rollup_hdrs:
            headers["Nats-Rollup"] = "sub"  # one marker a part is kept, not one a batch
        js = client.jetstream(timeout=self._timeout)
        answer = await js.publish(
            self._place(part), msgspec.json.encode(marker), stream=self.stream, headers=headers
        )
        return answer.seq

    def _place(self, part: int) -> str:
        return f"semel.frontier.{self.stream}.{self._token}.{part}"

    def _fenced(self, part: int, epoch: int, other: int) -> Fenced:
        return Fenced(f"part {part} of stream {self.stream!r} has epoch {other}, this relay {epoch}")

    # ------------------------------------------------------------------------------------------ the rows
    def _letters(self, client: Client, rows: Sequence[Row]) -> list[_Letter]:
        limit = client.max_payload
        if self._config is not None and self._config.max_msg_size and self._config.max_msg_size > 0:
            limit = min(limit, self._config.max_msg_size)
        letters: list[_Letter] = []
        refused: dict[str, str] = {}
        for row in rows:
            lines = to_lines(row)
            if isinstance(lines, str):
                refused[row.id] = lines
                continue
            # Those are orders to the server, not a message's to give: Nats-Rollup would erase the stream.
            lines = {name: line for name, line in lines.items() if not name.lower().startswith("nats-")}
            subject = filled(self.subject, row, escape=_subject)
            lines[ID] = row.id
            lines["Nats-Msg-Id"] = f"{subject}:{row.tenant}:{row.id}"
            size = len(row.body) + sum(len(name) + len(value) + 4 for name, value in lines.items()) + 12
            if size > limit:
                refused[row.id] = f"{size} bytes are more than NATS takes here ({limit})"
            subjects = (self._config.subjects if self._config is not None else None) or ()
            if subjects and not any(_takes(pattern, subject) for pattern in subjects):
                refused[row.id] = f"the stream {self.stream!r} has no subject for {subject[:100]!r}"
            letters.append(_Letter(subject, lines, row.body))
        if refused:
            raise Rejected(refused, final=refused.keys())
        return letters

    async def _send(self, client: Client, letters: Sequence[_Letter]) -> None:
        """All of them at once, in order, on one connection; then every acknowledgement."""
        box = client.new_inbox()
        answers: asyncio.Queue[Any] = asyncio.Queue()
        subscription = await client.subscribe(f"{box}.*", cb=answers.put)
        try:
            for number, letter in enumerate(letters):
                headers = {**letter.headers, "Nats-Expected-Stream": self.stream}
                await client.publish(letter.subject, letter.body, reply=f"{box}.{number}", headers=headers)
            for _ in letters:
                _acknowledged(await answers.get(), self.stream)
        finally:
            if client.is_connected:
                await subscription.unsubscribe()

    # -------------------------------------------------------------------------------------- connection
    async def _connected(self) -> Client:
        loop = asyncio.get_running_loop()
        if self._loop is not loop:
            self._loop, self._client, self._opening = loop, None, asyncio.Lock()
        if self._client is not None and self._client.is_connected:
            return self._client
        async with self._opening:
            if self._client is None or not self._client.is_connected:
                client = await self._connect()
                try:
                    self._config = await self._look(client)
                except BaseException:
                    await shut(client)
                    raise
                before, self._client = self._client, client
                if before is not None:
                    await shut(before)
        return self._client

    async def _connect(self) -> Client:
        address = self._address
        failures: list[Exception] = []
        gone: asyncio.Future[None] = asyncio.get_running_loop().create_future()

        async def keep(error: Exception) -> None:
            failures.append(error)

        async def end() -> None:
            if not gone.done():
                gone.set_result(None)

        client = Client()
        try:
            await client.connect(
                f"{'tls' if address.scheme == 'tls' else 'nats'}://{address.host}:{address.port}",
                user=address.user,
                password=address.password,
                name="semel",
                allow_reconnect=False,  # a batch is sent again by the relay, under its number
                max_reconnect_attempts=1,  # 0 means for ever
                reconnect_time_wait=0,
                connect_timeout=min(self._timeout, 3.0),  # type: ignore[arg-type]  # any number of seconds will do
                error_cb=keep,
                disconnected_cb=end,
                closed_cb=end,
                tls=address.tls("tls"),
            )
        except Error as error:
            await shut(client)
            for failure in (error, *failures):
                if "uthorization" in str(failure):
                    raise AuthorizationError from failure
            if isinstance(error, NoServersError) and failures:
                raise ConnectionError(str(failures[-1])) from error
            raise
        except BaseException:  # no answer in time, a connection that was cut, or we are told to end
            await shut(client)
            raise
        self._gone = gone
        return client

    async def _look(self, client: Client) -> StreamConfig:
        """The stream, made if need be; refused if it cannot keep markers."""
        js = client.jetstream(timeout=self._timeout)
        wanted = f"semel.frontier.{self.stream}.>"
        try:
            config = (await js.stream_info(self.stream)).config
        except NotFoundError:
            if not self._create:
                raise ConfigurationError(
                    f"NATS at {self._address.name} has no stream {self.stream!r}; add it with the subject {wanted!r} "
                    "among its subjects, or leave create=no out"
                ) from None
            config = await self._make(client, wanted)
        if not any(_covers(subject, wanted) for subject in config.subjects or ()):
            raise ConfigurationError(
                f"stream {self.stream!r} has no room for the numbers of batches: add the subject {wanted!r} to it "
                "(nats stream edit --subjects)"
            )
        return config

    async def _make(self, client: Client, marker: str) -> StreamConfig:
        fixed, _, rest = self.subject.partition("{")
        if rest and not fixed.endswith("."):
            raise ConfigurationError(
                f"a stream for the subject {self.subject!r} cannot be made: begin the subject with a fixed token, such as "
                f"{self.stream}.{{topic}}, or add the stream yourself"
            )
        config = StreamConfig(
            name=self.stream,
            subjects=[f"{fixed}>" if rest else fixed, marker],
            duplicate_window=self._window,
            allow_rollup_hdrs=True,
        )
        js = client.jetstream(timeout=self._timeout)
        try:
            return (await js.add_stream(config)).config
        except BadRequestError as error:
            # Another relay may be first. The server then says that the name is taken or that the subjects overlap, with those of
            # the stream that is just being made.
            try:
                return (await js.stream_info(self.stream)).config
            except NotFoundError:
                raise ConfigurationError(
                    f"stream {self.stream!r} cannot be made: {error.description}"
                ) from error

    def _refused(self, error: Exception) -> ConfigurationError:
        who = repr(self._address.user) if self._address.user else "a client without a user"
        return ConfigurationError(
            f"NATS at {self._address.name} refused {who} ({type(error).__name__}): correct user and password in the "
            "URL, or the server's authorization"
        )

    async def _forget(self) -> None:
        client, self._client = self._client, None
        if client is not None:
            await shut(client)

    async def aclose(self) -> None:
        """Close the connection."""
        if self._loop is asyncio.get_running_loop():
            await self._forget()


def _acknowledged(message: Any, stream: str) -> None:
    if message.headers and message.headers.get("Status") == "503":
        raise NoRespondersError
    answer = json.loads(message.data)
    if "error" in answer:
        raise APIError.from_error(answer["error"])
    if answer.get("stream") != stream:
        raise ConnectionError(f"another stream took the message: {answer.get('stream')!r}")


def _token(source: str) -> str:
    """A source as one token of a subject; no two sources have the same."""
    return re.sub(r"[^A-Za-z0-9-]", lambda found: f"_{ord(found[0]):x}_", source)


def _subject(value: str) -> str:
    return ".".join(token or "_" for token in _UNFIT.sub("_", value).strip(".").split("."))


def _takes(pattern: str, subject: str) -> bool:
    """Whether a subject of a stream is one of a pattern."""
    if pattern == subject:
        return True
    tokens, words = subject.split("."), pattern.split(".")
    for place, word in enumerate(words):
        if word == ">":
            return len(tokens) > place
        if place >= len(tokens) or word not in {"*", tokens[place]}:
            return False
    return len(tokens) == len(words)


def _covers(pattern: str, wanted: str) -> bool:
    """Whether every subject of `wanted`, which ends in >, is one of `pattern`."""
    ours = wanted.split(".")
    for place, word in enumerate(pattern.split(".")):
        if word == ">":
            return True
        if place >= len(ours) - 1 or word not in {"*", ours[place]}:
            return False
    return False
