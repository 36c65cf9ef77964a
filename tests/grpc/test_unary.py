"""The rows of the specification for calls that do not stream, on every store and in both colours."""

from __future__ import annotations

import threading
import time
from io import BytesIO
from pathlib import Path
from typing import Any

import grpc
import pytest

from semel import ConfigurationError, Semel, SemelWarning, current_run
from semel.grpc import Method, core_key, policy, recorded
from semel.grpc.rules import Rules, patience
from tests.grpc.lab import MARKER, PUSHBACK, SERVICE, Lab, Loop, Stop, shop

Code = grpc.StatusCode


def test_g08_a_repetition_gets_the_recorded_bytes_and_says_so(lab: Lab) -> None:
    lab.serve()
    first = lab.call(key="k-1")
    again = lab.call(key="k-1")
    assert first.message == again.message == shop.Made(id="order of book")
    assert (first.replayed, again.replayed) == ("false", "true")
    assert len(lab.calls) == 1


def test_g08_no_key_no_marker_no_protection(lab: Lab) -> None:
    lab.serve()
    assert lab.call().replayed is None
    assert lab.call().replayed is None
    assert len(lab.calls) == 2


def test_g08_trailing_metadata_is_replayed_by_allow_list(lab: Lab) -> None:
    def act(request: object, say: grpc.ServicerContext) -> object:
        say.set_trailing_metadata(
            (("etag", "v1"), ("set-cookie", "secret"), ("x-cost", "3"), ("raw-bin", b"\0\xff"))
        )
        return shop.Made(id="1")

    lab.act = act
    lab.serve(replay_metadata=["x-cost", "raw-bin"])
    first, again = lab.call(key="k-1"), lab.call(key="k-1")
    assert first.trailing["set-cookie"] == "secret"
    assert {name: again.trailing.get(name) for name in ("etag", "x-cost", "raw-bin", "set-cookie")} == {
        "etag": "v1",
        "x-cost": "3",
        "raw-bin": b"\0\xff",
        "set-cookie": None,
    }


def test_g04_two_principals_never_meet_and_the_method_is_part_of_the_request(lab: Lab) -> None:
    lab.act = lambda request, say: shop.Made(id=str(len(lab.calls)))
    lab.serve()
    assert lab.call(key="k-1", user="ann").message.id == "1"
    assert lab.call(key="k-1", user="bob").message.id == "2"
    assert lab.call(key="k-1", user="ann").message.id == "1"
    other = lab.call("Cancel", key="k-1", user="ann")
    assert (other.code, other.reason) == (Code.FAILED_PRECONDITION, "KEY_REUSED")
    assert len(lab.calls) == 2


def test_g04_tenants_are_told_apart(lab: Lab) -> None:
    def tenant(context: grpc.ServicerContext) -> str:
        return f"{lab.tenant}-{dict(context.invocation_metadata())['house']!s}"

    lab.serve(tenant=tenant)
    for house in ("red", "blue", "red"):
        lab.call(key="k-1", metadata=[("house", house)])
    assert len(lab.calls) == 2


def test_g06_in_progress_waits_and_shares_the_outcome(lab: Lab) -> None:
    go = threading.Event()

    def act(request: object, say: object) -> object:
        assert go.wait(20)
        return shop.Made(id="one")

    lab.act = act
    lab.serve()
    both = [lab.later(key="k-1") for _ in range(2)]
    lab.wait_for(lambda: lab.calls)
    third = lab.later(key="k-1")
    go.set()
    replies = [one.result(20) for one in (*both, third)]
    assert [one.message.id for one in replies] == ["one"] * 3
    assert sorted(str(one.replayed) for one in replies) == ["false", "true", "true"]
    assert len(lab.calls) == 1


def test_g06_in_progress_is_aborted_with_retry_info_and_pushback_when_the_wait_is_over(lab: Lab) -> None:
    go = threading.Event()

    def act(request: object, say: object) -> object:
        assert go.wait(20)
        return shop.Made(id="one")

    lab.act = act
    lab.serve(wait=0)
    first = lab.later(key="k-1")
    lab.wait_for(lambda: lab.calls)
    second = lab.call(key="k-1")
    assert (second.code, second.reason) == (Code.ABORTED, "IN_PROGRESS")
    delay = second.infos["RetryInfo"].retry_delay.ToMilliseconds()
    assert 50 <= delay <= 1000
    assert second.trailing[PUSHBACK] == str(delay)
    assert second.initial == {}, "initial metadata would commit the call and end its retries"
    mismatch = lab.call(request=shop.Order(item="pen"), key="k-1")
    assert mismatch.reason == "KEY_REUSED", "a conflict is told while the first one runs"
    go.set()
    assert first.result(20).message.id == "one"


def test_g06_the_wait_ends_before_the_callers_deadline(light: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
    """The last tenth of the caller's time is for the answer; here it is all but a twentieth, for a busy machine."""
    go = threading.Event()
    waits: list[tuple[float, float]] = []

    def hasty(rules: Rules, remaining: float | None) -> float:
        if remaining is None:
            return patience(rules, remaining)
        waits.append((patience(rules, remaining), remaining))
        return patience(rules, remaining / 20)

    monkeypatch.setattr(policy, "patience", hasty)

    def act(request: object, say: object) -> object:
        assert go.wait(20)
        return shop.Made()

    light.act = act
    light.serve(wait=60)
    first = light.later(key="k-1")
    light.wait_for(lambda: light.calls)
    second = light.call(key="k-1", timeout=30.0)
    assert second.code is Code.ABORTED, "the server's word, not the client's DEADLINE_EXCEEDED"
    wait, remaining = waits[-1]
    assert 0 < wait < remaining
    go.set()
    first.result(20)


def test_g07_another_request_under_the_key_is_refused_for_good(lab: Lab) -> None:
    lab.serve()
    lab.call(key="k-1")
    other = lab.call(request=shop.Order(item="pen"), key="k-1")
    assert (other.code, other.reason) == (Code.FAILED_PRECONDITION, "KEY_REUSED")
    assert other.trailing[PUSHBACK] == "-1"
    assert "book" not in other.details
    assert "k-1" not in str(other.infos), "neither key nor stored data is told"
    assert len(lab.calls) == 1


STORED = [
    Code.INVALID_ARGUMENT,
    Code.NOT_FOUND,
    Code.ALREADY_EXISTS,
    Code.FAILED_PRECONDITION,
    Code.OUT_OF_RANGE,
]
NOT_STORED = [
    Code.CANCELLED,
    Code.DEADLINE_EXCEEDED,
    Code.UNAVAILABLE,
    Code.RESOURCE_EXHAUSTED,
    Code.UNAUTHENTICATED,
    Code.PERMISSION_DENIED,
    Code.ABORTED,
    Code.UNKNOWN,
    Code.INTERNAL,
]


def test_g09_a_final_status_is_stored_with_its_details(lab: Lab) -> None:
    lab.serve()
    for code in STORED:
        extra = [("grpc-status-details-bin", b"\x08\x05"), ("x-once", "1")]

        def act(request: object, say: object, code: grpc.StatusCode = code, extra: list = extra) -> object:
            raise Stop(code, f"it is {code.name}", extra)

        lab.act = act
        lab.calls.clear()
        first, again = lab.call(key=f"k-{code.name}"), lab.call(key=f"k-{code.name}")
        assert (first.code, first.details) == (again.code, again.details) == (code, f"it is {code.name}")
        assert again.trailing["grpc-status-details-bin"] == b"\x08\x05"
        assert "x-once" in first.trailing
        assert "x-once" not in again.trailing
        assert (first.replayed, again.replayed) == ("false", "true")
        assert len(lab.calls) == 1


def test_g10_a_passing_status_frees_the_key(lab: Lab) -> None:
    lab.serve()
    for code in NOT_STORED:

        def act(request: object, say: object, code: grpc.StatusCode = code) -> object:
            if len(lab.calls) == 1:
                raise Stop(code, "not now")
            return shop.Made(id="done")

        lab.act = act
        lab.calls.clear()
        first, again = lab.call(key=f"k-{code.name}"), lab.call(key=f"k-{code.name}")
        assert (first.code, first.details) == (code, "not now")
        assert first.initial == {}, "a client may still retry it"
        assert first.trailing[MARKER] == "false"
        assert again.message.id == "done"
        assert again.replayed == "false"


def test_g10_a_passing_status_beside_no_message_frees_the_key(light: Lab) -> None:
    """`set_code` and a bare `return` are how many handlers refuse: None cannot be serialized, and need not be."""

    def act(request: object, say: grpc.ServicerContext) -> object:
        if len(light.calls) == 1:
            say.set_code(Code.UNAVAILABLE)
            say.set_details("not now")
            return None
        return shop.Made(id="done")

    light.act = act
    light.serve()
    first, again = light.call(key="k-1"), light.call(key="k-1")
    assert (first.code, first.details) == (Code.UNAVAILABLE, "not now")
    assert (again.message.id, again.replayed) == ("done", "false")


def test_g09_a_final_status_beside_no_message_is_stored(light: Lab) -> None:
    light.act = lambda request, say: say.set_code(Code.NOT_FOUND)
    light.serve()
    assert [light.call(key="k-1").code for _ in range(2)] == [Code.NOT_FOUND] * 2
    assert len(light.calls) == 1


def test_g10_an_exception_is_grpcs_unknown_and_frees_the_key(lab: Lab) -> None:
    def act(request: object, say: object) -> object:
        if len(lab.calls) == 1:
            raise LookupError("broken")
        return shop.Made(id="done")

    lab.act = act
    lab.serve()
    first = lab.call(key="k-1")
    assert first.code is Code.UNKNOWN
    assert "broken" in first.details
    assert lab.call(key="k-1").message.id == "done"


def test_g10_opaque_effects_are_held_until_somebody_decides(lab: Lab) -> None:
    def act(request: object, say: object) -> object:
        raise LookupError("did the bank answer?")

    lab.act = act
    lab.serve(effects="opaque")
    assert lab.call(key="k-1").code is Code.UNKNOWN
    again = lab.call(key="k-1")
    assert (again.code, again.reason) == (Code.FAILED_PRECONDITION, "OUTCOME_UNKNOWN")
    assert again.trailing[PUSHBACK] == "-1"
    assert len(lab.calls) == 1
    lab.do(
        lab.once.resolve(
            core_key("k-1", "ann"),
            operation="http",
            value=recorded(shop.Made(id="looked up").SerializeToString()),
            result_type=bytes,
            actor="eve",
            reason="seen at the bank",
        )
    )
    settled = lab.call(key="k-1")
    assert settled.message.id == "looked up"
    assert settled.replayed == "true"
    assert len(lab.calls) == 1


def test_g10_a_passing_refusal_frees_the_key_of_an_opaque_method_too(light: Lab) -> None:
    def act(request: object, say: object) -> object:
        if len(light.calls) == 1:
            raise Stop(Code.RESOURCE_EXHAUSTED, "later")
        return shop.Made(id="done")

    light.act = act
    light.serve(effects="opaque")
    assert light.call(key="k-1").code is Code.RESOURCE_EXHAUSTED
    assert light.call(key="k-1").message.id == "done"


def test_g10_steps_go_on_where_they_stopped(lab: Lab) -> None:
    done: list[str] = []

    def act(request: object, say: object) -> object:
        run = current_run()
        for name in ("reserve", "charge"):
            run.step(name, done.append, name)
            if len(lab.calls) == 1:
                raise LookupError("after reserve")
        return shop.Made(id="placed")

    lab.act = act
    lab.serve(effects="steps")
    assert lab.call(key="k-1").code is Code.UNKNOWN
    assert lab.call(key="k-1").message.id == "placed"
    assert done == ["reserve", "charge"]


def test_g10_on_status_has_the_last_word(light: Lab) -> None:
    def act(request: object, say: object) -> object:
        raise Stop(Code.NOT_FOUND if len(light.calls) == 1 else Code.INTERNAL, "no")

    light.act = act
    light.serve(on_status=lambda code: {Code.NOT_FOUND: "release", Code.INTERNAL: "store"}.get(code))
    codes = [light.call(key="k-1").code for _ in range(3)]
    assert codes == [Code.NOT_FOUND, Code.INTERNAL, Code.INTERNAL]
    assert len(light.calls) == 2


def test_g11_a_client_that_leaves_does_not_change_the_outcome(lab: Lab) -> None:
    go = threading.Event()

    def act(request: object, say: object) -> object:
        assert go.wait(20)
        return shop.Made(id="made without a client")

    lab.act = act
    lab.serve()
    assert lab.leave("k-1") is Code.CANCELLED
    go.set()
    lab.wait_for(lambda: lab.finished, "the handler ran to its end")
    again = lab.call(key="k-1")
    assert again.message.id == "made without a client"
    assert again.replayed == "true"
    assert len(lab.calls) == 1


def test_g11_a_deadline_that_passes_does_not_change_the_outcome(light: Lab) -> None:
    passed = threading.Event()

    def act(request: object, say: grpc.ServicerContext) -> object:
        light.wait_for(lambda: not say.time_remaining(), "the deadline")
        assert passed.wait(20)
        return shop.Made(id="late")

    light.act = act
    light.serve()
    assert light.call(key="k-1", timeout=2.0).code is Code.DEADLINE_EXCEEDED
    passed.set()
    light.wait_for(lambda: light.finished, "the handler ran to its end")
    assert light.call(key="k-1").message.id == "late"
    assert len(light.calls) == 1


def test_g12_an_expired_key_is_refused(lab: Lab) -> None:
    lab.serve(retention=0.2, tombstone=60)
    lab.call(key="k-1")
    reply = lab.call(key="k-1")
    deadline = time.monotonic() + 10
    while reply.code is Code.OK and time.monotonic() < deadline:
        reply = lab.call(key="k-1")
    assert (reply.code, reply.reason) == (Code.FAILED_PRECONDITION, "KEY_EXPIRED")
    assert reply.trailing[PUSHBACK] == "-1"
    assert len(lab.calls) == 1


def test_g12_without_a_tombstone_an_expired_key_is_a_new_one(light: Lab) -> None:
    light.serve(retention=0.1, tombstone=0)
    light.call(key="k-1")
    light.wait_for(lambda: light.call(key="k-1").replayed == "false")
    assert len(light.calls) == 2


def test_g12_a_uuid7_older_than_anything_kept_is_expired_without_a_record(light: Lab) -> None:
    light.serve(retention=3600)
    old = f"{int((time.time() - 7200) * 1000):012x}"
    reply = light.call(key=f"{old[:8]}-{old[8:]}-7000-8000-000000000001")
    assert reply.reason == "KEY_EXPIRED"
    assert light.calls == []


def test_g16_an_answer_over_the_cap_is_done_and_never_run_again(lab: Lab) -> None:
    def act(request: object, say: object) -> object:
        current_run().set_ref("orders/17")
        return shop.Made(blob=b"x" * 2000)

    lab.act = act
    lab.serve(max_response=1000)
    assert len(lab.call(key="k-1").message.blob) == 2000, "the first caller gets all of it"
    again = lab.call(key="k-1")
    assert (again.code, again.reason) == (Code.FAILED_PRECONDITION, "RESPONSE_NOT_STORED")
    assert again.infos["ResourceInfo"].resource_name == "orders/17"
    assert again.trailing[PUSHBACK] == "-1"
    assert len(lab.calls) == 1


def test_g14_parallel_copies_of_one_call_run_once_and_none_is_aborted(lab: Lab) -> None:
    lab.serve()
    replies = [one.result(20) for one in [lab.later(key="k-1") for _ in range(8)]]
    assert {one.message.id for one in replies} == {"order of book"}
    assert len(lab.calls) == 1


def test_g18_a_key_is_the_same_bare_and_quoted_and_is_known_to_http(lab: Lab) -> None:
    lab.serve()
    assert lab.call(key='"k-1"').replayed == "false"
    assert lab.call(key="k-1").replayed == "true"
    record = lab.do(lab.once.peek(core_key("k-1", "ann"), operation="http"))
    assert record is not None
    assert record.state == "done"


def test_g18_an_answer_of_the_other_carrier_is_not_run_again(light: Lab) -> None:
    light.serve()
    light.call(key="k-1")
    where = {"operation": "http", "tenant": light.tenant}
    record = light.do(light.once.peek(core_key("k-1", "ann"), **where))
    light.do(light.once.forget(core_key("k-1", "ann"), **where))
    light.do(
        light.once.execute(
            core_key("k-1", "ann"), lambda: b"an HTTP snapshot", fingerprint=record.fingerprint.hex(), **where
        )
    )
    again = light.call(key="k-1")
    assert (again.code, again.reason) == (Code.FAILED_PRECONDITION, "RESPONSE_NOT_STORED")
    assert len(light.calls) == 1


def test_a_response_that_cannot_be_serialized_is_an_outcome_and_not_a_reason_to_run_again(light: Lab) -> None:
    light.act = lambda request, say: object()
    light.serve()
    assert [light.call(key="k-1").code for _ in range(2)] == [Code.INTERNAL] * 2
    assert len(light.calls) == 1


def test_a_status_set_before_raising_counts(light: Lab) -> None:
    def act(request: object, say: grpc.ServicerContext) -> object:
        say.set_code(Code.NOT_FOUND)
        say.set_details("no such book")
        raise LookupError

    light.act = act
    light.serve()
    replies = [light.call(key="k-1") for _ in range(2)]
    assert [(one.code, one.details) for one in replies] == [(Code.NOT_FOUND, "no such book")] * 2
    assert len(light.calls) == 1


def test_options_of_one_method_differ(light: Lab) -> None:
    light.serve(
        required=True,
        methods={f"{SERVICE}/Create": Method(), f"{SERVICE}/Cancel": Method(required=False)},
    )
    assert light.call("Create").reason == "KEY_MISSING"
    assert light.call("Cancel").replayed is None
    assert light.call("Put", key="k-1").replayed is None, "a method that was not named ignores keys"


@pytest.mark.parametrize("answer", [False, 0, True, None, PermissionError()])
def test_authorize_is_asked_before_a_replay_too(light: Lab, answer: object) -> None:
    answers: list[object] = [True, answer]

    def authorize(context: object) -> object:
        said = answers.pop(0)
        if isinstance(said, PermissionError):
            raise said
        return said

    light.serve(authorize=authorize)
    light.call(key="k-1")
    again = light.call(key="k-1")
    if answer is True:
        assert again.replayed == "true"
    else:
        assert (again.code, again.reason) == (Code.PERMISSION_DENIED, "NOT_AUTHORIZED")
    assert len(light.calls) == 1


@pytest.mark.parametrize("principal", [None, "", True, 7.0, object()])
def test_a_caller_without_identity_is_refused(light: Lab, principal: object) -> None:
    light.serve(principal=lambda context: principal)
    assert light.call(key="k-1").reason == "NOT_AUTHENTICATED"
    assert light.calls == []


def test_g18_a_key_that_was_used_over_http_is_known_here(colour: str, aio_loop: Loop, tmp_path: Path) -> None:
    """One identity for both carriers: it does not run a second time because it came another way."""
    from semel.http.wsgi import IdempotencyMiddleware

    url = f"sqlite:///{tmp_path / 'semel.db'}"
    lab = Lab(colour, url, aio_loop)
    ran: list[str] = []

    def app(environ: dict[str, Any], start: Any) -> list[bytes]:
        ran.append("http")
        start("201 Created", [("Content-Type", "text/plain")])
        return [b"made"]

    try:
        lab.serve()
        with Semel(url, tenant=lab.tenant) as once:
            http: Any = IdempotencyMiddleware(
                app, once=once, principal=lambda request: "ann", authenticated_outside=True
            )
            environ = {
                "REQUEST_METHOD": "POST",
                "PATH_INFO": "/orders",
                "HTTP_IDEMPOTENCY_KEY": '"k-1"',
                "SERVER_NAME": "127.0.0.1",
                "SERVER_PORT": "80",
                "wsgi.url_scheme": "http",
                "wsgi.input": BytesIO(b""),
                "CONTENT_LENGTH": "0",
            }
            assert b"".join(http(environ, lambda *_: None)) == b"made"
        reply = lab.call(key="k-1")
        assert (reply.code, reply.reason) == (Code.FAILED_PRECONDITION, "KEY_REUSED")
        assert (ran, lab.calls) == (["http"], [])
    finally:
        lab.close()


def test_a_failure_that_a_person_declared_is_told(light: Lab) -> None:
    def act(request: object, say: object) -> object:
        raise LookupError

    light.act = act
    light.serve(effects="opaque")
    light.call(key="k-1")
    light.do(
        light.once.resolve(core_key("k-1", "ann"), operation="http", error="the bank refused", actor="eve")
    )
    reply = light.call(key="k-1")
    assert (reply.code, reply.reason) == (Code.FAILED_PRECONDITION, "PREVIOUS_FAILURE")
    assert len(light.calls) == 1


@pytest.mark.parametrize("word", ["release", "store"])
def test_a_stored_failure_inside_a_handler_tells_the_client_no_key(light: Lab, word: Any) -> None:
    with Semel("memory://") as inner:
        with pytest.raises(LookupError):
            inner.execute("order-4711", _declined, on_error="replay")

        def act(request: object, say: object) -> object:
            return inner.execute("order-4711", _declined)

        light.act = act
        light.serve(on_status=lambda code: word)
        for _ in range(2):
            reply = light.call(key="k-1")
            assert reply.code is Code.UNKNOWN
            assert reply.details.endswith(": LookupError: declined")


def _declined() -> None:
    raise LookupError("declined")


@pytest.mark.parametrize("value", [{"paid": 7}, None, "paid", b"no answer of gRPC's"])
def test_whatever_a_person_decides_is_an_answer(light: Lab, value: object) -> None:
    light.act = lambda request, say: (_ for _ in ()).throw(LookupError)
    light.serve(effects="opaque")
    light.call(key="k-1")
    light.do(light.once.resolve(core_key("k-1", "ann"), operation="http", value=value, actor="eve"))
    for _ in range(2):
        reply = light.call(key="k-1")
        assert (reply.code, reply.reason) == (Code.FAILED_PRECONDITION, "RESPONSE_NOT_STORED")
        assert "settled by hand" in reply.details
        assert reply.trailing[PUSHBACK] == "-1"
    assert len(light.calls) == 1


def test_a_person_may_say_an_answer_without_its_type(light: Lab) -> None:
    light.act = lambda request, say: (_ for _ in ()).throw(LookupError)
    light.serve(effects="opaque")
    light.call(key="k-1")
    value = recorded(code=Code.NOT_FOUND, details="no such account")
    light.do(light.once.resolve(core_key("k-1", "ann"), operation="http", value=value, actor="eve"))
    reply = light.call(key="k-1")
    assert (reply.code, reply.details, reply.replayed) == (Code.NOT_FOUND, "no such account", "true")


def test_what_no_caller_could_be_given_is_not_recorded() -> None:
    wrong: Any = "text", 5
    with pytest.raises(ConfigurationError, match="SerializeToString"):
        recorded(wrong[0])
    with pytest.raises(ConfigurationError, match=r"grpc\.StatusCode"):
        recorded(code=wrong[1])


def test_a_face_that_is_switched_off_promises_nothing(light: Lab) -> None:
    with pytest.warns(SemelWarning, match="switched off"):
        light.serve(settings={"enabled": False})
    for _ in range(2):
        assert light.call(key="k-1").replayed is None
    assert len(light.calls) == 2


def test_g18_the_operation_is_that_of_the_face_as_over_http(light: Lab) -> None:
    light.serve(settings={"operation": "billing"})
    light.call("Create", shop.Order(item="a"), key="k-1")
    assert light.do(light.once.peek(core_key("k-1", "ann"), operation="billing")) is not None
    light.serve(settings={"operation": "billing"}, operation="orders")
    light.call("Create", shop.Order(item="a"), key="k-1")
    assert light.do(light.once.peek(core_key("k-1", "ann"), operation="orders")) is not None
    assert len(light.calls) == 2
