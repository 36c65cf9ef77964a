"""No tenant, operation or key is ever told what belongs to another, however the names are spelled."""

from __future__ import annotations

import re
import unicodedata
import uuid
from itertools import product

import pytest
from hypothesis import assume, example, given
from hypothesis import strategies as st

from semel import Semel
from semel.keys import downstream_key, make_scope
from semel.layers import Namespace
from semel.stores.memory import MemoryStore
from semel.stores.redis.index import Names
from semel.testing import services

from .conftest import told

# Joined by any of these, cut anywhere, the same text appears in many ways.
SEPARATORS = (":", "/", "|", ".", "-", "\\", " ", "{", "}", "#", "::", "%", "_")
_part = st.text(alphabet=":/|.{}ab% é", min_size=1, max_size=6)
names = st.tuples(_part, _part, _part, _part)


@given(first=names, second=names)
@example(first=("a", "b:c", "d", "e"), second=("a", "b", "c:d", "e"))
@example(first=("a:b", "c", "d", "e"), second=("a", "b:c", "d", "e"))
@example(first=("p", "t", "o", "k"), second=("p", "t", "ok", "k"))
def test_two_scopes_never_share_a_hash_a_redis_key_or_a_downstream_key(
    first: tuple[str, str, str, str], second: tuple[str, str, str, str]
) -> None:
    assume(first != second)
    one, two = make_scope(*first), make_scope(*second)
    assert one.hash != two.hash
    if first[1:] != second[1:]:
        assert downstream_key(*first[1:], "peer") != downstream_key(*second[1:], "peer")
    # No client's text is in the name of a Redis key, so none steers its records to a slot of its choice.
    names_of = Names("semel")
    for scope in (one, two):
        assert re.fullmatch(rb"\{semel:[0-9a-f]{3}\}:r:", names_of.of(scope.hash).record)


@given(first=_part, second=_part, key=_part)
def test_two_namespaces_never_share_a_scope(first: str, second: str, key: str) -> None:
    assume(first != second)
    scope = make_scope("p", "t", "o", key)
    store = MemoryStore()
    assert Namespace(store, first).moved(scope).hash != Namespace(store, second).moved(scope).hash


def look_alikes() -> list[tuple[str, str, str]]:
    """Names that a separator, a collation, a case fold or a normalization would take for one another."""
    found = [("a", "b", f"c{sep}d") for sep in SEPARATORS]
    found += [("a", f"b{sep}c", "d") for sep in SEPARATORS]
    found += [(f"a{sep}b", "c", "d") for sep in SEPARATORS]
    spelled = (
        "é",
        "e\u0301",
        "É",
        "e",
        "E",
        "ß",
        "ss",
        "SS",
        "ﬁ",
        "fi",
        "K",
        "\u212a",
        "k",
        "ı",
        "i",
        "İ",
        "a ",
        "a",
        " a",
    )
    found += [("t", "o", text) for text in spelled]
    found += [("t", text, "k") for text in spelled[:8]]
    found += [(text, "o", "k") for text in spelled[:8]]
    return sorted(set(found))


def test_names_that_look_alike_are_different_things_in_every_store(once: Semel) -> None:
    prefix = uuid.uuid4().hex[:6]
    scopes = [(f"{prefix}{tenant}", operation, key) for tenant, operation, key in look_alikes()]
    for scope in scopes:
        tenant, operation, key = scope
        outcome = once.execute(key, told(repr(scope)), tenant=tenant, operation=operation)
        assert not outcome.replayed, scope
    for scope in scopes:
        tenant, operation, key = scope
        assert once.execute(key, told("stolen"), tenant=tenant, operation=operation).value == repr(scope)
    gone = scopes[0]
    assert once.forget(gone[2], tenant=gone[0], operation=gone[1])
    for tenant, operation, key in scopes[1:]:
        assert once.peek(key, tenant=tenant, operation=operation) is not None


def test_look_alikes_do_look_alike() -> None:
    """The list has teeth: by some rule that stores and programs use, its names are the same."""
    texts = ["/".join(scope) for scope in look_alikes()]
    folds = (
        str.casefold,
        str.strip,
        lambda text: unicodedata.normalize("NFKC", text),
        lambda text: text.upper(),
    )
    for fold in folds:
        assert len({fold(text) for text in texts}) < len(texts)


def test_a_prefix_a_tenant_and_a_namespace_keep_a_shared_store_apart(store_url: str) -> None:
    mine = uuid.uuid4().hex
    worlds = [
        {"prefix": f"{mine}{prefix}", "tenant": tenant, "namespace": namespace}
        for prefix, tenant, namespace in product(("a", "b"), ("t", "u"), (None, "n", "m"))
    ]
    faces = [Semel(store_url, timeout=20, **world) for world in worlds]  # type: ignore[arg-type]  # options by their names
    try:
        for number, face in enumerate(faces):
            assert face.execute("key", told(number)).value == number
        for number, face in enumerate(faces):
            assert face.execute("key", told(-1)).value == number
        assert faces[0].forget("key")
        assert all(face.peek("key") is not None for face in faces[1:])
    finally:
        for face in faces:
            face.close()


@pytest.mark.services
def test_in_a_cluster_no_client_steers_its_records_to_one_node(redis_cluster: services.RedisCluster) -> None:
    def sizes() -> list[int]:
        return [
            int(node.command("DBSIZE"))
            for node in redis_cluster.nodes
            if node.info("replication")["role"] == "master"
        ]

    before = sizes()
    with Semel(redis_cluster.url, prefix=uuid.uuid4().hex, timeout=20) as once:
        for number in range(72):
            once.execute(f"{{steer}}{number}", told(number), tenant="{steer}", operation="{steer}")
    grown = [after - size for size, after in zip(before, sizes(), strict=True)]
    assert min(grown) > 0, f"72 keys with one hash tag in their names lie on the masters like this: {grown}"
