"""A replay that the store's quick way has read in short is answered as the whole record would be."""

from __future__ import annotations

from math import inf

import pytest

from semel.calls import Call
from semel.http.problem import Problem
from semel.http.snapshot import Snapshot, Spilled
from semel.http.stored import CODEC, repeated, stored
from semel.keys import make_scope
from semel.model import Record, State
from semel.options import Options
from semel.posting import Brief


def _encoded(snapshot: Snapshot) -> bytes:
    return CODEC.encode(snapshot.encode())


@pytest.mark.parametrize(
    ("result", "kind"),
    [
        (_encoded(Snapshot(201, [(b"content-type", b"text/plain")], b"made")), Snapshot),
        (_encoded(Snapshot(201, kept=False, spilled=Spilled("name", b"h" * 32, 7))), Snapshot),
        (_encoded(Snapshot(201, [(b"location", b"/orders/1")], kept=False)), Problem),
        (CODEC.encode({"said": "plainly"}), Snapshot),
        (b"\x10\xc4", Problem),
        (b"", Problem),
    ],
    ids=["whole", "spilled", "not kept", "a value", "damaged", "nothing"],
)
def test_a_short_replay_is_answered_as_the_whole_record(
    result: bytes, kind: type[Snapshot | Problem]
) -> None:
    call = Call(make_scope("semel", "default", "http", "key-1 ada"), "key-1 ada", Options())
    record = Record(State.DONE, b"n" * 16, 1, 1, 1.0, 2.0, 2.0, inf, result=result)
    whole = stored(call, record)
    assert isinstance(whole, kind)
    assert repeated(call, Brief(1, inf, b"head of the record" + result, 18)) == whole
