"""Random sequences of verbs and clock jumps, for the proof that a store equals the model.

Time never comes near an edge: all spans are multiples of ten seconds and a sequence's n-th jump ends 0.2 n seconds past
one, so the milliseconds that pass on a real server cannot change a decision.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from math import inf
from typing import Any, Literal

import msgspec
from hypothesis import strategies as st

from semel.model import Failure, Kind, Policy

CHAPTERS = 6  # of at most 5 jumps; each jump adds DRIFT, so nothing comes within 4 s of the next edge
DRIFT = 0.2
NONCES = [bytes([n]) * 16 for n in range(1, 4)]
WORDS = [bytes([n]) * 16 for n in range(11, 14)]
SEEN, UNSEEN = -1.0, -2.0  # for `noted` of a word: as the record says it, and another time
Who = Literal["owner", "one", "two", "three", "nobody"]


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
            steps=st.sampled_from([None, None, b"", b"short"]),
            noted=st.sampled_from([None, None, SEEN, UNSEEN]),
            **outcome,
        ),
    )


words = worded((Kind.DONE, Kind.FAILED, Kind.FAILED, Kind.RELEASED, Kind.UNKNOWN))
forgets = st.builds(
    Step,
    verb=st.just("forget"),
    who=st.sampled_from(["nobody", "nobody", "owner", "one"]),
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
    st.tuples(claims(("one",)), notes, settles((Kind.RELEASED,)), jumps(0.0, 10.0), claims(("two",)), notes),
    st.tuples(
        claims(("one",), STRICT),
        notes,
        jump,
        settles((Kind.RELEASED,)),
        jumps(0.0, 10.0, 20.0),
        claims(("two",)),
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
