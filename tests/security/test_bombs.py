"""Values made to hurt: deep, wide, huge, endless, not a number. Refused in bounded time, before anything has happened."""

from __future__ import annotations

import resource
import struct
import sys
import time
import zlib
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from semel import CodecError, InvalidKey, OutcomeUnknown, Semel, fingerprint, ids, steps
from semel.codec import encoder_for, preview
from semel.keys import make_scope
from semel.model import Ask, Kind, Settle
from semel.runtime import run_sync
from semel.stores.memory import MemoryStore
from semel.stores.redis.record import Unreadable, read_record

QUICK = 5.0  # seconds of this process's own time, on a slow and busy machine


def deep(levels: int, wrap: Callable[[Any], Any] = lambda inner: [inner]) -> Any:
    value: Any = 0
    for _ in range(levels):
        value = wrap(value)
    return value


def endless() -> Any:
    value: list[Any] = []
    value.append({"again": value})
    return value


REQUESTS: dict[str, Callable[[], Any]] = {
    "a thousand levels": lambda: deep(1_000),
    "a hundred thousand levels": lambda: deep(100_000),
    "deep mappings": lambda: deep(20_000, lambda inner: {"a": inner}),
    "deep tuples": lambda: deep(20_000, lambda inner: (inner,)),
    "itself": endless,
    "very many parts": lambda: list(range(300_000)),
    "very many names": lambda: {str(number): 0 for number in range(300_000)},
    "forty megabytes": lambda: "x" * 40_000_000,
    "not a number": lambda: {"amount": float("nan")},
    "infinity": lambda: [float("-inf")],
    "half a character": lambda: "\ud800",
    "a number of a million digits": lambda: 10**1_000_000,
    "an object": object,
}


# A result may hold what a request may not, as long as it comes back equal.
RESULTS = [
    "forty megabytes",
    "a hundred thousand levels",
    "an object",
    "deep mappings",
    "deep tuples",
    "itself",
]


@pytest.mark.parametrize("name", REQUESTS)
def test_a_request_that_is_a_bomb_is_refused_soon_and_runs_nothing(name: str) -> None:
    request, ran = REQUESTS[name](), []
    with Semel("memory://") as once:
        began = time.process_time()
        with pytest.raises(CodecError):
            once.execute("k", lambda: ran.append(1), request=request)
        assert time.process_time() - began < QUICK
        assert once.peek("k") is None
    assert not ran


@pytest.mark.parametrize("name", RESULTS)
def test_a_result_that_is_a_bomb_leaves_a_mark_and_is_never_run_again(name: str) -> None:
    ran = []

    def effect() -> Any:
        ran.append(1)
        return REQUESTS[name]()

    with Semel("memory://") as once:
        began = time.process_time()
        try:
            once.execute("k", effect)
        except CodecError as error:
            assert error.recorded and "recorded as done" in str(error)  # noqa: PT017, PT018 - one way of two
        record = once.peek("k")
        assert record is not None
        assert record.state.value == "done"
        assert len(record.result) <= 1 << 20
        with pytest.raises(CodecError):
            _ = once.execute("k", effect).value
        assert time.process_time() - began < 4 * QUICK
    assert ran == [1]


# -------------------------------------------------------------------------------------------- what is read back


def stored(result: bytes) -> Semel:
    """A face whose store holds these very bytes as the outcome of "k"."""
    store = MemoryStore()
    scope = make_scope("semel", "default", "default", "k")
    run_sync(store.claim([Ask(scope, b"n" * 16, 10.0, 60.0)]))
    run_sync(store.settle([Settle(scope, b"n" * 16, Kind.DONE, 60.0, result=result)]))
    return Semel(store)


PLAIN = encoder_for(None).encode(0)[:1]
CRAFTED = {
    "a list that says it has four billion items": PLAIN + b"\xdd" + struct.pack(">I", 2**32 - 1),
    "a mapping that says so": PLAIN + b"\xdf" + struct.pack(">I", 2**32 - 1),
    "text that says so": PLAIN + b"\xdb" + struct.pack(">I", 2**32 - 1) + b"abc",
    "bytes that say so": PLAIN + b"\xc6" + struct.pack(">I", 2**32 - 1) + b"abc",
    "an extension that says so": PLAIN + b"\xc9" + struct.pack(">Ib", 2**32 - 1, 1) + b"abc",
    "a hundred thousand lists in lists": PLAIN + b"\x91" * 100_000 + b"\xc0",
    "a hundred thousand mappings": PLAIN + b"\x81\xa1a" * 100_000 + b"\xc0",
    "a stream that pickle would run": b"\x80\x04\x95\x1e\x00\x00\x00\x00\x00\x00\x00\x8c\x05posix\x94\x8c\x06system\x94\x93",
    "nothing of ours": b"\xff\xfe\xfd",
}


@pytest.mark.parametrize("name", CRAFTED)
def test_stored_bytes_that_were_crafted_are_unreadable_and_harm_nobody(name: str) -> None:
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with stored(CRAFTED[name]) as once, pytest.raises(OutcomeUnknown):
        once.execute("k", lambda: "ran again")
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 200_000, "kilobytes"


@given(st.binary(max_size=200))
def test_no_bytes_make_the_codec_do_anything_but_read_or_refuse(data: bytes) -> None:
    for body in (data, PLAIN + data, bytes([PLAIN[0] | 1]) + zlib.compress(data)):
        for read in (encoder_for(None).decode, encoder_for(dict[str, int]).decode, preview):
            try:
                read(body)
            except CodecError:
                continue


@given(
    st.recursive(st.one_of(st.none(), st.integers(), st.text(), st.binary()), st.lists, max_leaves=8),
    st.data(),
)
def test_a_flipped_byte_is_another_value_or_unreadable(value: Any, data: st.DataObject) -> None:
    good = encoder_for(None).encode(value)
    at = data.draw(st.integers(0, len(good) - 1))
    flipped = good[:at] + bytes([good[at] ^ data.draw(st.integers(1, 255))]) + good[at + 1 :]
    try:
        encoder_for(None).decode(flipped)
    except CodecError:
        return


@given(st.binary(max_size=300))
def test_no_bytes_make_a_redis_record_anything_but_a_record_or_unreadable(data: bytes) -> None:
    for body in (data, b"\x5e\x01" + data):
        try:
            read_record(body, 0, None, b"h" * 32)
        except Unreadable:
            continue


@given(st.text(max_size=60))
def test_an_id_is_parsed_or_refused(text: str) -> None:
    try:
        assert ids.parse(text).text
    except InvalidKey:
        return


@given(st.lists(st.integers()) | st.dictionaries(st.text(), st.floats(allow_nan=False, allow_infinity=False)))
def test_equal_requests_have_equal_fingerprints_and_text_has_another(value: Any) -> None:
    assert fingerprint(value) == fingerprint(value)
    assert fingerprint(value) != fingerprint(str(value))


def test_the_limit_of_recursion_is_left_as_it_was() -> None:
    before = sys.getrecursionlimit()
    for name in ("a thousand levels", "itself"):
        with pytest.raises(CodecError):
            fingerprint(REQUESTS[name]())
    assert sys.getrecursionlimit() == before
    assert steps.decode(b"") == {}
