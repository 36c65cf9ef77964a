"""What goes in comes out: every field, hostile text, large and binary results, tenants kept apart."""

# ruff: noqa: N802, S106 - a test bears the number of its ruling; a secret's id is no secret

from __future__ import annotations

from semel.model import Answer, Failure, Kind, Policy, Replay, State, Won
from semel.testing.contract.bench import Bench, clause, step

__all__ = ["IdentityClauses", "ValueClauses"]

HOSTILE = (
    "plain",
    "ünï©ødé",
    "日本語のキー",
    "🙂" * 4,
    "e\u0301 is not é",
    "'; DROP TABLE semel; --",
    '" OR ""="',
    "back\\slash \\' \\\" \\0 \\x00",
    "%s %d %(name)s {0} {name} {{}} $1 :name ?",
    "{tag}}{",
    "a:b:c",
    "a|b/c#d*e[f]?g",
    "return redis.call('FLUSHALL')",
    "*3\r".strip() + "$3 SET",
    "null",
    "NULL",
    "0",
    "-0.0",
    "true",
    "_",
    " ",
    " leading and trailing ",
    "Plain",
    "plain ",
    "x" * 255,
    "🙂" * 255,
    "ß" * 254 + "!",
)


class ValueClauses:
    """Round trips."""

    @clause
    async def test_every_field_of_a_record_comes_back(self, bench: Bench) -> None:
        labels = {"scene": "café", "empty": "", "quote'\"": "line\nbreak\ttab"}
        ask = await bench.win(
            policy=Policy.PROBE,
            fingerprint=bytes(range(32)),
            fingerprint_version=3,
            labels=labels,
            secret_id="k-2",
        )
        assert await bench.note(ask, b"\x00step\xff") is Answer.OK
        error = Failure("Oops", "E-1", "it broke:\n'ü' \\ \"🙂\"")
        await bench.finish(
            ask,
            Kind.FAILED,
            result=b"\x00\x01",
            ref="ord_ü",
            marker="m",
            error=error,
            tombstone=5,
            policy=Policy.HOLD,
        )
        record = await bench.record(ask.scope)
        assert record.scope == ask.scope
        assert (record.state, record.nonce, record.policy) == (State.FAILED, ask.nonce, Policy.HOLD)
        assert (record.fingerprint, record.fingerprint_version) == (bytes(range(32)), 3)
        assert (record.labels, record.secret_id, record.steps) == (labels, "k-2", step(b"\x00step\xff"))
        assert (record.result, record.ref, record.marker, record.error) == (b"\x00\x01", "ord_ü", "m", error)
        assert (record.attempts, record.resolved) == (1, False)
        assert bench.near(record.tombstone, record.expires + 5 * bench.unit)

    @clause
    async def test_a_failure_may_lack_code_and_message(self, bench: Bench) -> None:
        for number, failure in enumerate(
            (Failure("A"), Failure("B", ""), Failure("C", None, "m"), Failure("", "c"))
        ):
            ask = await bench.settled(Kind.FAILED, bench.scope(str(number)), error=failure)
            assert (await bench.record(ask.scope)).error == failure

    @clause
    async def test_results_come_back_byte_for_byte(self, bench: Bench) -> None:
        results = (
            b"\x00",
            bytes(range(256)),
            b"'\"\\%_{}",
            "ü🙂".encode(),
            b"\r\n$-1\r\n",
            b"\xff\xfe" * 1000,
        )
        for number, result in enumerate(results):
            ask = await bench.settled(Kind.DONE, bench.scope(str(number)), result=result)
            verdict = await bench.claim(bench.ask(ask.scope))
            assert isinstance(verdict, Replay)
            assert verdict.record.result == result

    @clause
    async def test_a_result_of_one_mebibyte_comes_back(self, bench: Bench) -> None:
        result = bytes(range(256)) * 4096
        ask = await bench.settled(Kind.DONE, result=result)
        verdict = await bench.claim(bench.ask(ask.scope))
        assert isinstance(verdict, Replay)
        assert verdict.record.result == result
        assert (await bench.record(ask.scope)).result == result

    @clause
    async def test_a_long_ref_and_message_come_back(self, bench: Bench) -> None:
        error = Failure("E" * 200, "c" * 100, "ü" * 2000)
        ask = await bench.settled(Kind.FAILED, ref="r" * 255, error=error)
        record = await bench.record(ask.scope)
        assert (record.ref, record.error) == ("r" * 255, error)

    @clause
    async def test_many_labels_come_back(self, bench: Bench) -> None:
        labels = {f"label-{n}": "🙂" * n for n in range(32)}
        ask = await bench.win(labels=labels)
        assert (await bench.record(ask.scope)).labels == labels


class IdentityClauses:
    """Two scopes never meet, however their names are spelled."""

    @clause
    async def test_R21_hostile_names_are_keys_like_any_other(self, bench: Bench) -> None:
        asks = [bench.ask(bench.scope(name, operation=name)) for name in HOSTILE]
        verdicts = await bench.store.claim(asks)
        assert all(isinstance(verdict, Won) for verdict in verdicts), verdicts
        ends = [bench.end(ask, result=ask.scope.key.encode()) for ask in asks]
        assert await bench.store.settle(ends) == [Answer.OK] * len(asks)
        for ask in asks:
            record = await bench.record(ask.scope)
            assert record.result == ask.scope.key.encode()
            assert record.scope is not None
            assert (record.scope.operation, record.scope.key) == (ask.scope.operation, ask.scope.key)

    @clause
    async def test_names_do_not_run_into_each_other(self, bench: Bench) -> None:
        pairs = (("a:b", "c"), ("a", "b:c"), ("ab", "c"), ("a", "bc"), ("A", "bc"), ("a ", "bc"))
        for operation, key in pairs:
            await bench.win(bench.scope(key, operation=operation))

    @clause
    async def test_no_tenant_sees_anothers_record(self, bench: Bench) -> None:
        mine = await bench.settled(Kind.DONE, result=b"mine", ref="shared-ref")
        other = bench.tenant + "-other"
        foreign = bench.scope(tenant=other)
        assert await bench.peek(foreign) is None
        assert isinstance(await bench.claim(bench.ask(foreign)), Won)
        assert await bench.forget(bench.scope("key", tenant=other + "2")) is Answer.OK
        assert (await bench.record(mine.scope)).result == b"mine"
        for tenant in (bench.tenant.upper(), bench.tenant + " ", bench.tenant[:-1], "%", "*"):
            assert await bench.found(tenant=tenant) == []
        assert await bench.found(tenant=other) == ["key"]
