"""Every store equals `model.py`: random sequences of all verbs and clock jumps, played on a store and on the model.

The reference is the memory store, which is the model under a lock. Time never comes near an edge: all spans are
multiples of ten seconds and a sequence's n-th jump ends 0.2 n seconds past one, so the milliseconds
that pass on a real server cannot change a decision.
"""

from __future__ import annotations

import asyncio
import itertools
import secrets
from collections.abc import Callable, Coroutine, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from math import inf
from typing import Any, Literal

import msgspec
import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from semel.keys import Scope, make_scope
from semel.model import (
    Answer,
    Ask,
    Busy,
    Event,
    Expired,
    Failure,
    Kind,
    Note,
    Policy,
    Record,
    Renewal,
    Replay,
    Settle,
    State,
    Unknown,
    Won,
    view,
)
from semel.runtime import run_sync
from semel.store import Query, Settings, Store, open_store
from semel.stores.memory import MemoryStore
from semel.testing import services
from tests.conftest import MODE

SEQUENCES = {"quick": 30, "full": 60, "long": 2000}[MODE]
CHAPTERS = 6  # of at most 5 jumps; each jump adds DRIFT, so nothing comes within 4 s of the next edge
DRIFT = 0.2
TOLERANCE = 2.4
NONCES = [bytes([n]) * 16 for n in range(1, 4)]
WORDS = [bytes([n]) * 16 for n in range(11, 14)]
Who = Literal["owner", "one", "two", "three", "nobody"]
Colour = Literal["sync", "async"]

# ---------------------------------------------------------------------------------------- sequences


class Step(msgspec.Struct, frozen=True):
    """One move. `who` and `takeover` name nonces; "owner" is whoever holds the key at that moment."""

    verb: Literal["claim", "settle", "word", "forget", "renew", "note", "jump", "purge", "claims", "settles"]
    scope: int = 0
    who: Who = "owner"
    options: tuple[tuple[str, Any], ...] = ()
    takeover: Who = "nobody"
    parts: tuple[Step, ...] = ()
    span: float = 0.0


def options(**values: st.SearchStrategy[Any]) -> st.SearchStrategy[tuple[tuple[str, Any], ...]]:
    return st.fixed_dictionaries(values).map(lambda chosen: tuple(chosen.items()))


# Weights matter: with even odds a sequence rarely gets further than its second claim. The odds below, and the stories, were
# chosen by counting how many sequences it takes to tell a wrong model from the right one.
retentions = st.sampled_from([20.0, 20.0, 20.0, 60.0, inf, 0.0])
owners: st.SearchStrategy[Who] = st.sampled_from(["owner", "owner", "owner", "owner", "one", "two"])


def claims(
    who: Sequence[Who] = ("one", "two", "three", "owner"),
    policy: Sequence[Policy] = (Policy.RETRY, Policy.RETRY, Policy.PROBE, Policy.HOLD),
    takeover: Sequence[Who] = ("nobody", "nobody", "nobody", "owner", "one"),
) -> st.SearchStrategy[Step]:
    return st.builds(
        Step,
        verb=st.just("claim"),
        who=st.sampled_from(who),
        options=options(
            lease=st.sampled_from([10.0, 10.0, 30.0]),
            retention=retentions,
            policy=st.sampled_from(policy),
            fingerprint=st.sampled_from([b"", b"f" * 32, b"f" * 32, b"f" * 32, b"g" * 32]),
            fingerprint_version=st.sampled_from([1, 1, 1, 2]),
            labels=st.sampled_from([None, {"scene": "café"}]),
            secret_id=st.sampled_from(["", "k1", "k2"]),
        ),
        takeover=st.sampled_from(takeover),
    )


outcome = {
    "retention": retentions,
    "tombstone": st.sampled_from([0.0, 30.0]),
    "result": st.sampled_from([b"", b"\x00result\xff"]),
    "marker": st.sampled_from(["", "json"]),
    "ref": st.sampled_from([None, "ord_1"]),
    "error": st.sampled_from([None, Failure("Declined", "card", "nö"), Failure("E")]),
}
KINDS = (Kind.DONE, Kind.FAILED, Kind.UNKNOWN, Kind.RELEASED)


def settles(
    kinds: Sequence[Kind] = KINDS, who: st.SearchStrategy[Who] = owners, **fixed: st.SearchStrategy[Any]
) -> st.SearchStrategy[Step]:
    return st.builds(
        Step,
        verb=st.just("settle"),
        who=who,
        options=options(
            kind=st.sampled_from(kinds),
            after=st.sampled_from([0.0, 0.0, 20.0, 40.0]),
            policy=st.sampled_from([None, None, None, *Policy]),
            steps=st.sampled_from([None, None, b"", b"short"]),
            **{**outcome, **fixed},
        ),
    )


def worded(
    kinds: Sequence[Kind], repair: Sequence[bool] = (False, False, False, True)
) -> st.SearchStrategy[Step]:
    return st.builds(
        Step,
        verb=st.just("word"),
        who=st.sampled_from(["nobody", "nobody", "owner", "one"]),
        options=options(
            kind=st.sampled_from(kinds),
            new_nonce=st.sampled_from(WORDS),
            repair=st.sampled_from(repair),
            actor=st.sampled_from(["ada", "bob", ""]),
            reason=st.sampled_from(["", "asked the bank"]),
            **outcome,
        ),
    )


words = worded((Kind.DONE, Kind.FAILED, Kind.FAILED, Kind.RELEASED, Kind.UNKNOWN))
forgets = st.builds(
    Step,
    verb=st.just("forget"),
    who=st.just("nobody"),
    options=options(retention=st.sampled_from([20.0, 60.0]), actor=st.sampled_from(["", "eve"])),
)
renewals = st.builds(
    Step,
    verb=st.just("renew"),
    who=owners,
    options=options(lease=st.sampled_from([10.0, 30.0]), retention=retentions),
)
notes = st.builds(
    Step, verb=st.just("note"), who=owners, options=options(entry=st.sampled_from([b"x", b"\x00\xff"]))
)


def jumps(*spans: float) -> st.SearchStrategy[Step]:
    return st.builds(Step, verb=st.just("jump"), span=st.sampled_from(spans))


jump = jumps(10.0, 10.0, 20.0, 30.0, 60.0)
purges = st.just(Step(verb="purge"))


def several(verb: str, step: st.SearchStrategy[Step]) -> st.SearchStrategy[Step]:
    part = st.builds(
        lambda step, scope: msgspec.structs.replace(step, scope=scope), step, st.sampled_from([0, 1, 2])
    )
    return st.builds(Step, verb=st.just(verb), parts=st.lists(part, min_size=2, max_size=4).map(tuple))


batches = several("claims", claims()) | several("settles", settles() | words | forgets)
anything = st.one_of(claims(), settles(), words, forgets, renewals, notes, jump, purges, batches)
STRICT = (Policy.PROBE, Policy.PROBE, Policy.HOLD)
stories = st.one_of(
    # an owner is lost, somebody else comes, the lost one comes back
    st.tuples(claims(("one",)), notes, jump, claims(("two",)), settles(who=st.just("one"))),
    st.tuples(
        claims(("one",), STRICT), jump, claims(("two",), takeover=("owner", "owner", "one")), settles()
    ),
    st.tuples(claims(("one",)), jump, renewals | notes, jump, settles()),
    st.tuples(claims(("one",)), jump, forgets, settles(who=st.just("one")) | claims(("two",))),
    # a failure is released, with and without steps, and tried again
    st.tuples(
        claims(("one",)), settles((Kind.RELEASED,)), jumps(0.0, 0.0, 30.0), claims(("two",)), settles()
    ),
    st.tuples(
        claims(("one",)), notes, settles((Kind.RELEASED,)), jumps(0.0, 10.0), claims(("two",)), notes
    ),
    # an outcome is unknown, people speak
    st.tuples(claims(("one",)), settles((Kind.UNKNOWN, Kind.FAILED)), words, words, claims(("two",))),
    st.tuples(claims(("one",)), settles((Kind.UNKNOWN,)), worded((Kind.FAILED,), (False,)), words),
    st.tuples(
        claims(("one",)), notes, settles((Kind.UNKNOWN,)), worded((Kind.RELEASED,)), claims(("two",)), words
    ),
    st.tuples(claims(("one",), STRICT), jump, words, settles(who=st.just("one")), words),
    # an outcome is replayed, buried, forgotten
    st.tuples(claims(("one",)), settles((Kind.DONE, Kind.FAILED)), jump, anything, purges, jump, anything),
    st.tuples(
        claims(("one",)),
        notes,
        settles((Kind.DONE, Kind.FAILED), retention=st.just(20.0), tombstone=st.just(30.0)),
        jumps(20.0, 30.0),
        purges | anything,
        claims() | settles() | renewals | notes | words,
    ),
    st.tuples(claims(("one",)), settles(), settles(), forgets, claims(("two",))),
)


def _on(scope: int, story: Sequence[Step]) -> tuple[Step, ...]:
    """A story happens to one key; a batch in it goes to several."""
    return tuple(msgspec.structs.replace(step, scope=scope) for step in story)


chapters = st.builds(
    _on, st.sampled_from([0, 0, 1]), st.one_of(stories, st.lists(anything, min_size=1, max_size=5))
)
sequences = st.lists(chapters, min_size=3, max_size=CHAPTERS).map(
    lambda story: tuple(itertools.chain(*story))
)

# ---------------------------------------------------------------------------------------- both sides


@dataclass
class Pair:
    """A store and the reference, played side by side."""

    store: Store
    run: Callable[[Coroutine[Any, Any, Any]], Any]

    def __post_init__(self) -> None:
        self.virtual = 0.0
        self.reference = MemoryStore(clock=lambda: 1_700_000_000.0 + self.virtual)
        self.tenant = f"tenant-{secrets.token_hex(8)}"
        self.scopes = [make_scope("equivalence", self.tenant, "op", f"key-{n}") for n in range(3)]
        self.tokens: dict[bytes, tuple[int, int]] = {}

    def play(self, sequence: Sequence[Step]) -> None:
        try:
            for step in sequence:
                self.take(step)
            for scope in self.scopes:
                self.compare_records(scope)
            self.compare_scans()
        finally:
            self.clear()

    def take(self, step: Step) -> None:
        match step.verb:
            case "jump":
                span = step.span + DRIFT
                self.virtual += span
                self.store._skew += span  # type: ignore[attr-defined]
            case "purge":
                for side in (self.reference, self.store):
                    while self.ask(side.purge(100)):
                        pass
                for scope in self.scopes:
                    self.compare_tombstone(scope)
            case "claim" | "claims":
                asks = [self.resolve(part) for part in step.parts or (step,)]
                self.both(lambda side: side.claim(asks))
            case "renew":
                self.both(lambda side: side.renew([self.resolve(step)]))
            case "note":
                self.both(lambda side: side.note(self.resolve(step)))
            case _:
                ends = [self.resolve(part) for part in step.parts or (step,)]
                self.both(lambda side: side.settle(ends))
        for number in sorted({part.scope for part in step.parts or (step,)}):
            self.compare_records(self.scopes[number])

    def ask(self, call: Coroutine[Any, Any, Any]) -> Any:
        return self.run(call)

    def both(self, call: Callable[[Store], Coroutine[Any, Any, Any]]) -> None:
        expected = run_sync(call(self.reference))
        actual = self.ask(call(self.store))
        base = run_sync(self.reference.peek(self.scopes[0]))[1], self.ask(self.store.peek(self.scopes[0]))[1]
        if not isinstance(expected, list):
            expected, actual = [expected], [actual]
        assert len(actual) == len(expected)
        for ours, theirs in zip(expected, actual, strict=True):
            compare_answers(ours, theirs, *base)

    def resolve(self, step: Step) -> Any:
        scope = self.scopes[step.scope]
        nonce = self.nonce(step.who, scope)
        chosen = dict(step.options)
        match step.verb:
            case "claim":
                return Ask(
                    scope=scope, nonce=nonce or NONCES[0], takeover=self.nonce(step.takeover, scope), **chosen
                )
            case "renew":
                return Renewal(scope=scope, nonce=nonce or NONCES[0], **chosen)
            case "note":
                return Note(scope=scope, nonce=nonce or NONCES[0], **chosen)
            case "forget":
                return Settle(scope=scope, nonce=b"", kind=Kind.FORGOTTEN, **chosen)
            case "word":
                return Settle(scope=scope, nonce=nonce, **chosen)
            case _:
                return Settle(scope=scope, nonce=nonce or NONCES[0], **chosen)

    def nonce(self, who: Who, scope: Scope) -> bytes:
        if who == "owner":
            record = run_sync(self.reference.peek(scope))[0]
            return b"" if record is None else record.nonce
        return {"one": NONCES[0], "two": NONCES[1], "three": NONCES[2], "nobody": b""}[who]

    # -------------------------------------------------------------------------------- comparing

    def compare_records(self, scope: Scope) -> None:
        expected, now = run_sync(self.reference.peek(scope))
        actual, then = self.ask(self.store.peek(scope))
        state = view(expected, now)
        assert view(actual, then) is state
        if expected is None or state is None:
            self.tokens.pop(scope.hash, None)
        elif state is not State.EXPIRED:
            compare_records(expected, actual, now, then)
            before = self.tokens.get(scope.hash)
            if before is not None:
                assert (actual.token > before[1]) == (expected.token > before[0])
            self.tokens[scope.hash] = expected.token, actual.token

    def compare_tombstone(self, scope: Scope) -> None:
        """After a purge the body is gone (R19); before it, a store may still have it."""
        record, now = self.ask(self.store.peek(scope))
        if view(record, now) is State.EXPIRED:
            assert (record.result, record.ref, record.error, record.steps) == (b"", None, None, b"")
            assert (record.marker, record.labels or None) == ("", None)

    def compare_scans(self) -> None:
        for query in (
            Query(tenant=self.tenant),
            Query(tenant=self.tenant, states=frozenset({State.UNKNOWN})),
            Query(tenant=self.tenant, states=frozenset({State.RUNNING, State.FAILED})),
            Query(tenant=self.tenant, abandoned=True),
            Query(tenant=self.tenant, ref="ord_1"),
        ):
            expected, actual = run_sync(self.reference.scan(query)), self.ask(self.store.scan(query))
            found = [
                sorted((record.scope.key, view(record, page.now)) for record in page.records if record.scope)
                for page in (expected, actual)
            ]
            assert found[1] == found[0], query
        for scope in self.scopes:
            trails: list[Sequence[Event]] = [
                run_sync(self.reference.scan(Query(history=scope))).events,
                self.ask(self.store.scan(Query(history=scope))).events,
            ]
            plain = [[msgspec.structs.replace(event, at=0.0) for event in trail] for trail in trails]
            assert plain[1] == plain[0]

    def clear(self) -> None:
        """Leave nothing behind: unknown records would stay for ever and slow the next sequence down."""
        ends = [Settle(scope, b"", Kind.FORGOTTEN, 0.0) for scope in self.scopes]
        self.store._skew += 100.0  # type: ignore[attr-defined]
        self.ask(self.store.settle(ends))


_TIMES = ("created", "updated", "lease_until", "expires", "settled", "tombstone", "not_before", "noted")


def compare_records(expected: Record, actual: Record, now: float, then: float) -> None:
    for name in Record.__struct_fields__:
        ours, theirs = getattr(expected, name), getattr(actual, name)
        if name == "token":
            continue
        if name in _TIMES and ours not in {None, 0.0, inf}:
            assert theirs is not None, name
            assert theirs - then == pytest.approx(ours - now, abs=TOLERANCE), name
        elif name == "labels":
            assert (theirs or None) == (ours or None)
        else:
            assert theirs == ours, name


def compare_answers(ours: Any, theirs: Any, now: float, then: float) -> None:
    if isinstance(ours, Answer):
        assert theirs is ours
        return
    assert type(theirs) is type(ours), (ours, theirs)
    match ours:
        case Won() | Replay() | Unknown():
            assert ours.record is not None
            compare_records(ours.record, theirs.record, now, then)
            if isinstance(ours, Unknown):
                assert (theirs.policy, theirs.unreadable) == (ours.policy, ours.unreadable)
        case Busy():
            assert (theirs.attempt, theirs.delayed) == (ours.attempt, ours.delayed)
            assert theirs.retry_after == pytest.approx(ours.retry_after, abs=TOLERANCE)
        case Expired():
            assert theirs.until - then == pytest.approx(ours.until - now, abs=TOLERANCE)
        case _:
            assert theirs == ours


# ---------------------------------------------------------------------------------------- the stores


@contextmanager
def driven(colour: Colour) -> Iterator[Callable[[Coroutine[Any, Any, Any]], Any]]:
    """A way to run coroutines: without a loop, or in one loop for the whole test."""
    if colour == "sync":
        yield run_sync
    else:
        with asyncio.Runner() as runner:
            yield runner.run


def prove(url: str, colour: Colour, record_property: Callable[[str, object], None]) -> None:
    played = itertools.count()
    with driven(colour) as run:
        store = open_store(url, Settings(index=frozenset({"ref"})), colour)

        @settings(
            max_examples=SEQUENCES,
            suppress_health_check=list(HealthCheck),
            phases=[Phase.explicit, Phase.generate, Phase.shrink],
            print_blob=True,
        )
        @given(sequences)
        def sequence_by_sequence(sequence: tuple[Step, ...]) -> None:
            next(played)
            Pair(store, run).play(sequence)

        try:
            sequence_by_sequence()
        finally:
            run(store.aclose())
    count = next(played)
    print(f"{count} sequences equal the model on {url.partition(':')[0]} ({colour})")
    record_property("sequences", count)
    assert count >= SEQUENCES


@pytest.fixture(params=["sync", "async"])
def colour(request: pytest.FixtureRequest) -> Colour:
    return "sync" if request.param == "sync" else "async"


pytestmark = [pytest.mark.slow, pytest.mark.timeout(900 if MODE == "long" else 120)]
Property = Callable[[str, object], None]


def test_sqlite_equals_the_model(sqlite_url: str, colour: Colour, record_property: Property) -> None:
    prove(sqlite_url, colour, record_property)


def test_postgres_by_asyncpg_equals_the_model(asyncpg_url: str, record_property: Property) -> None:
    prove(asyncpg_url, "async", record_property)


def test_postgres_by_psycopg_equals_the_model(psycopg_url: str, record_property: Property) -> None:
    prove(psycopg_url, "sync", record_property)


def test_mariadb_by_asyncmy_equals_the_model(asyncmy_url: str, record_property: Property) -> None:
    prove(asyncmy_url, "async", record_property)


def test_mariadb_by_pymysql_equals_the_model(pymysql_url: str, record_property: Property) -> None:
    prove(pymysql_url, "sync", record_property)


def test_redis_equals_the_model(
    redis_server: services.RedisServer, colour: Colour, record_property: Property
) -> None:
    prove(redis_server.url, colour, record_property)


def test_valkey_equals_the_model(valkey_server: services.RedisServer, record_property: Property) -> None:
    prove(valkey_server.url, "async", record_property)


def test_redis_cluster_equals_the_model(
    redis_cluster: services.RedisCluster, record_property: Property
) -> None:
    prove(redis_cluster.url, "async", record_property)
