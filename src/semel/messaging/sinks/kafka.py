"""Kafka: transactional. Complete, but not in the guarantee table: it has run on librdkafka's mock cluster only.

`kafka://host:9092?topic=orders` (`{topic}` and `{tenant}` are filled in). A part of an outbox is a transactional id, so that
Kafka itself refuses the producer that was overtaken. A batch is one transaction: its messages, and a marker with its number in
the topic `semel.frontier` (one partition, compacted; it is made when it is not there), which is read back when a part is taken
over. A consumer with `isolation.level=read_committed` sees a batch once and whole.

librdkafka's calls block, so they run in threads, one at a time for each part.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final, Self

import msgspec

from semel.errors import ConfigurationError
from semel.messaging.sink import Fenced, Guarantee, Rejected, Row, SinkUnavailable
from semel.messaging.sinks.address import Address, needs
from semel.messaging.sinks.closing import Closing
from semel.messaging.sinks.envelope import ID, filled, to_headers

try:
    from confluent_kafka import (
        OFFSET_BEGINNING,
        Consumer,
        KafkaError,
        KafkaException,
        Producer,
        TopicPartition,
    )
    from confluent_kafka.admin import AdminClient
    from confluent_kafka.cimpl import NewTopic
except ModuleNotFoundError as missing:  # pragma: no cover - needs an environment without it
    raise needs("confluent-kafka", "kafka") from missing

__all__ = ["KafkaSink"]

_FENCED: Final = {
    KafkaError._FENCED,  # noqa: SLF001  # librdkafka's own codes begin so
    KafkaError.PRODUCER_FENCED,
    KafkaError.INVALID_PRODUCER_EPOCH,
}
_REFUSED: Final = {
    KafkaError._AUTHENTICATION,  # noqa: SLF001 - librdkafka spells them so
    KafkaError.SASL_AUTHENTICATION_FAILED,
    KafkaError.TOPIC_AUTHORIZATION_FAILED,
    KafkaError.GROUP_AUTHORIZATION_FAILED,
    KafkaError.TRANSACTIONAL_ID_AUTHORIZATION_FAILED,
}
_TOO_LARGE: Final = 1_000_000  # message.max.bytes of a client and, nearly, of a broker
_AROUND: Final = 64  # bytes at most, around a message and around each of its headers
_log = logging.getLogger("semel.messaging.kafka")


class _Marker(msgspec.Struct):
    """The last batch of a part, and whose it was."""

    epoch: int = 0
    batch: int = 0


@dataclass(slots=True)
class _Owner:
    """A part's transactional producer. While nobody fences it, what it wrote last is the frontier."""

    epoch: int
    producer: Any
    marker: _Marker


class KafkaSink(Closing):
    """Writes to a topic. `settings` are librdkafka's own (`security.protocol`, `sasl.username`, …), kept as given."""

    guarantee: Guarantee = "at-least-once"  # what is shown; exact is what the transactions are for

    def __init__(
        self,
        url: str,
        topic: str = "{topic}",
        *,
        timeout: float = 10.0,
        frontier: str = "semel.frontier",
        create: bool = True,
        settings: dict[str, Any] | None = None,
    ) -> None:
        self._address = Address.of(url, port=9092, options=())
        self.topic = topic
        self._timeout = timeout
        self._frontier = frontier
        self._create = create
        self._settings: dict[str, Any] = {
            "bootstrap.servers": self._address.name,
            "client.id": "semel",
            **_login(self._address),
            **(settings or {}),
        }
        self._source = "semel"
        self._producers: dict[tuple[int, str], _Owner] = {}
        self._locks: dict[tuple[int, str], asyncio.Lock] = {}
        self._loop: asyncio.AbstractEventLoop | None = None

    @classmethod
    def from_url(cls, url: str) -> Self:
        """From `kafka://user:password@host:9092?topic=NAME&timeout=10&frontier=NAME&create=no` (`kafkas://` for TLS)."""
        address = Address.of(url, port=9092, options=("topic", "timeout", "frontier", "create"))
        return cls(
            url.partition("?")[0],
            address.text("topic", "{topic}"),
            timeout=address.number("timeout", 10.0),
            frontier=address.text("frontier", "semel.frontier"),
            create=address.flag("create", default=True),
        )

    def bind(self, source: str) -> None:
        """Who publishes: two outboxes that write to one topic have transactional ids of their own."""
        self._source = source

    def lane(self, row: Row) -> str:
        """One frontier per topic."""
        return filled(self.topic, row) if "{" in self.topic else ""

    async def publish(self, part: int, epoch: int, batch: int, rows: Sequence[Row]) -> int | None:
        """Write the rows and their number in one transaction; the number that was there.

        Rejected names those that are too large. Their number is used all the same, and raises again when it comes again.
        """
        large, fit = _sorted_out(rows, int(self._settings.get("message.max.bytes", _TOO_LARGE)))
        topic = filled(self.topic, rows[0])
        loop = asyncio.get_running_loop()
        if self._loop is not loop:
            self._loop, self._locks = loop, {}
        async with self._locks.setdefault((part, topic), asyncio.Lock()):
            try:
                found = await asyncio.to_thread(self._publish, part, epoch, batch, topic, fit)
            except TimeoutError as error:
                raise SinkUnavailable(
                    f"Kafka at {self._address.name} did not answer in time: {error}"
                ) from error
            except KafkaException as error:
                self._producers.pop((part, topic), None)
                raise self._told(error.args[0], part, epoch) from error
        if large and found >= batch - 1:
            raise Rejected(large, delivered=[row.id for row in fit], final=large.keys())
        return found

    # ------------------------------------------------------------------------------------ in a thread
    def _publish(self, part: int, epoch: int, batch: int, topic: str, rows: Sequence[Row]) -> int:
        owner = self._owner(part, epoch, topic)
        found = owner.marker.batch
        if found != batch - 1:
            return found
        marker = _Marker(epoch, batch)
        producer = owner.producer
        producer.begin_transaction()
        try:
            for row in rows:
                _produce(producer, topic, row.body, row.key, headers=_headers(row))
            _produce(
                producer, self._frontier, msgspec.json.encode(marker), self._name(part, topic), partition=0
            )
            producer.commit_transaction(self._timeout)
        except BaseException:
            _abort(producer, self._timeout)
            raise
        owner.marker = marker
        return found

    def _owner(self, part: int, epoch: int, topic: str) -> _Owner:
        """The producer of a part. Making one fences whoever had the part before, and ends what it left open."""
        known = self._producers.get((part, topic))
        if known is not None and known.epoch >= epoch:
            if known.epoch > epoch:
                raise self._fenced(part, epoch, known.epoch)
            return known
        name = self._name(part, topic)
        if self._create:
            self._make_frontier()
        producer = Producer(
            {
                **self._settings,
                "transactional.id": name,
                "transaction.timeout.ms": int(self._timeout * 1000),
                "enable.idempotence": True,
            },
            logger=_log,
        )
        producer.init_transactions(self._timeout)
        marker = self._read(name)
        if marker.epoch > epoch:  # the later owner, fenced by us just now, makes itself a new producer
            raise self._fenced(part, epoch, marker.epoch)
        owner = self._producers[part, topic] = _Owner(epoch, producer, marker)
        return owner

    def _make_frontier(self) -> None:
        admin = AdminClient(self._settings, logger=_log)
        if self._frontier in admin.list_topics(timeout=self._timeout).topics:
            return
        topic = NewTopic(self._frontier, 1, config={"cleanup.policy": "compact"})
        try:
            admin.create_topics([topic], operation_timeout=self._timeout)[self._frontier].result(
                self._timeout
            )
        except KafkaException as error:
            if error.args[0].code() != KafkaError.TOPIC_ALREADY_EXISTS:
                raise

    def _read(self, name: str) -> _Marker:
        """The last marker of a part, read to the end that was there when we became the owner."""
        place = TopicPartition(self._frontier, 0, OFFSET_BEGINNING)
        marker = _Marker()
        settings = {
            **self._settings, "group.id": name, "enable.auto.commit": False, "enable.partition.eof": True,
        }  # fmt: skip
        # Uncommitted, for the end. Up to there everything must have been decided: a transaction of another part that is
        # still open would hide a marker of ours behind it.
        everything = Consumer({**settings, "isolation.level": "read_uncommitted"}, logger=_log)
        _, end = everything.get_watermark_offsets(place, self._timeout)
        everything.close()
        consumer = Consumer({**settings, "isolation.level": "read_committed"}, logger=_log)
        consumer.assign([place])
        deadline = time.monotonic() + self._timeout
        try:
            while time.monotonic() < deadline:
                message: Any = consumer.poll(0.1)
                if message is None:
                    continue
                if message.error() is None:
                    if message.key() == name.encode():
                        marker = msgspec.json.decode(message.value(), type=_Marker)
                elif message.error().code() != KafkaError._PARTITION_EOF:  # noqa: SLF001 - librdkafka spells them so
                    raise KafkaException(message.error())
                elif message.offset() >= end:
                    return marker
        finally:
            consumer.close()
        raise TimeoutError(f"{self._frontier} could not be read to its end")

    def _fenced(self, part: int, epoch: int, other: int) -> Fenced:
        return Fenced(f"part {part} of topic {self.topic!r} has epoch {other}, this relay {epoch}")

    def _name(self, part: int, topic: str) -> str:
        return f"semel.{self._source}.{topic}.{part}"

    def _told(self, error: Any, part: int, epoch: int) -> Exception:
        if error.code() in _FENCED:
            return Fenced(f"another relay took part {part} over; this one has epoch {epoch}")
        if error.code() in _REFUSED:
            return ConfigurationError(
                f"Kafka at {self._address.name} refused user {self._address.user!r} ({error.name()}): correct user, "
                "password or rights"
            )
        return SinkUnavailable(f"Kafka at {self._address.name} did not take the batch: {error.str()}")

    async def aclose(self) -> None:
        """Let the producers go; each of them is between transactions."""
        producers, self._producers = self._producers, {}
        for owner in producers.values():
            await asyncio.to_thread(owner.producer.flush, self._timeout)


def _headers(row: Row) -> list[tuple[str, bytes]]:
    return [(name, value.encode()) for name, value in {**to_headers(row), ID: row.id}.items()]


def _size(row: Row) -> int:
    """At most; what librdkafka finds too large when it is written would stop all others."""
    headers = sum(len(name.encode()) + len(value) + _AROUND for name, value in _headers(row))
    return len(row.body) + len((row.key or "").encode()) + headers + _AROUND


def _sorted_out(rows: Sequence[Row], most: int) -> tuple[dict[str, str], list[Row]]:
    """What is too large and why, and what may go: nothing behind a large one of its own key."""
    large: dict[str, str] = {}
    stopped: set[tuple[str, str]] = set()
    fit: list[Row] = []
    for row in rows:
        if row.key is not None and (row.tenant, row.key) in stopped:
            continue
        if (size := _size(row)) > most:
            large[row.id] = f"{size} bytes, with its headers, are more than a Kafka message has ({most})"
            if row.key is not None:
                stopped.add((row.tenant, row.key))
        else:
            fit.append(row)
    return large, fit


def _produce(
    producer: Any,
    topic: str,
    body: bytes,
    key: str | None,
    *,
    headers: Sequence[tuple[str, bytes]] = (),
    partition: int = -1,  # by the key
) -> None:
    name = None if key is None else key.encode()
    while True:
        try:
            producer.produce(topic, body, key=name, headers=list(headers) or None, partition=partition)
        except BufferError:
            producer.poll(0.1)  # its queue is full: let it send
        else:
            return


def _abort(producer: Any, timeout: float) -> None:
    """The transaction is over also if this fails: its producer is not used again, and the next one aborts what it left."""
    try:
        producer.abort_transaction(timeout)
    except KafkaException as error:
        _log.info("a transaction was left to its timeout: %s", error)


def _login(address: Address) -> dict[str, str]:
    tls = address.scheme == "kafkas"
    if address.user is None:
        return {"security.protocol": "SSL"} if tls else {}
    return {
        "security.protocol": "SASL_SSL" if tls else "SASL_PLAINTEXT",
        "sasl.mechanism": "PLAIN",
        "sasl.username": address.user,
        "sasl.password": address.password or "",
    }
