"""One key per logical request over all attempts, in httpx (both colours) and requests, against a server that misbehaves."""

from __future__ import annotations

import gzip
import json
import math
import signal
import socket
import ssl
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any
from uuid import UUID

import httpx
import pytest
import requests
from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat

from semel.errors import ConfigurationError, InvalidKey
from semel.http.client import (
    BodyNotRepeatable,
    IdempotentAdapter,
    IdempotentTransport,
    RetentionOver,
    sending,
)
from semel.testing.services.home import free_port
from tests.http.libraries import LIBRARIES, TRANSPORT_ERRORS, Caller, Library
from tests.http.rogue import BUSY, PROBLEM, Rogue, Say, problem, rogue


@pytest.fixture
def server() -> Iterator[Rogue]:
    with rogue() as one:
        yield one


@pytest.fixture(params=LIBRARIES)
def library(request: pytest.FixtureRequest) -> Library:
    chosen: Library = request.param
    return chosen


@contextmanager
def tls_server(folder: Path) -> Iterator[str]:
    """A server whose certificate nobody has signed but itself."""
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "127.0.0.1")])
    now = datetime.now(UTC)
    made = x509.CertificateBuilder(name, name, key.public_key(), 1, now, now + timedelta(days=1))
    pem = made.sign(key, hashes.SHA256()).public_bytes(Encoding.PEM)
    pem += key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())
    (folder / "server.pem").write_bytes(pem)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(folder / "server.pem")
    with rogue(context) as one:
        yield one.url


def once(server: Rogue) -> None:
    """The effect happened once, and every attempt had the same key."""
    assert len(server.effects) == 1
    assert len(set(server.keys)) == 1
    assert server.keys[0] is not None


# -- keys ---------------------------------------------------------------------------------------------------------------


def test_every_request_gets_a_key_of_its_own(library: Library, server: Rogue) -> None:
    caller = Caller(library)
    replies = [caller.post(server.url, json={"n": 1}), caller.post(server.url, json={"n": 1})]
    first, second = server.keys
    assert first != second
    assert UUID(first).version == 7
    assert [reply.report.key for reply in replies] == [first, second]
    assert len(server.effects) == 2
    assert replies[0].report.attempts == 1
    assert replies[0].report.honoured
    assert not replies[0].report.replayed


def test_a_key_of_the_callers_own_wins(library: Library, server: Rogue) -> None:
    server.script = ["lose"]
    reply = Caller(library).post(server.url, headers={"idempotency-key": '"mine"'})
    assert server.keys == ['"mine"', '"mine"']
    assert reply.report.replayed


def test_a_key_can_be_given_for_one_request(library: Library, server: Rogue) -> None:
    Caller(library).post(server.url, wishes={"key": "order-7"})
    assert server.keys == ["order-7"]


def test_keys_may_be_made_by_the_caller_and_sent_quoted(library: Library, server: Rogue) -> None:
    caller = Caller(library, key=lambda request: f'n"{request.method}', quoted=True, header="X-Key")
    caller.post(server.url)
    assert server.seen[0].headers["x-key"] == '"n\\"POST"'


def test_other_methods_are_left_alone(library: Library, server: Rogue) -> None:
    server.script = [Say(503, {"Idempotency-Replayed": "false"})]
    reply = Caller(library).request("PUT", server.url, content=b"x")
    assert (reply.status, server.keys, reply.how) == (503, [None], None)


@pytest.mark.parametrize("methods", [["put"], "put"])
def test_methods_are_configurable(library: Library, server: Rogue, methods: list[str] | str) -> None:
    server.script = ["lose"]
    Caller(library, methods=methods).request("PUT", server.url, content=b"x")
    once(server)


def test_a_request_can_be_left_out(library: Library, server: Rogue) -> None:
    server.script = ["drop"]
    with pytest.raises(TRANSPORT_ERRORS):
        Caller(library).post(server.url, wishes={"enabled": False})
    assert server.keys == [None]


# -- lost attempts ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("word", ["drop", "lose", "cut"])
def test_a_reply_that_is_lost_is_asked_for_again(library: Library, server: Rogue, word: str) -> None:
    server.script = [word, word]
    reply = Caller(library).post(server.url, json={"cents": 500})
    assert reply.status == 201
    assert json.loads(reply.body) == {"effect": 1}
    assert reply.report.attempts == 3
    assert reply.report.replayed is (word != "drop")
    once(server)


def test_a_timeout_is_asked_for_again(library: Library, server: Rogue) -> None:
    server.script = ["hang"]
    reply = Caller(library).post(server.url, json={}, timeout=0.5)
    assert reply.report.replayed
    once(server)


def test_a_server_that_is_not_there_is_asked_again_until_attempts_run_out(library: Library) -> None:
    port = free_port()
    told: list[Any] = []
    caller = Caller(library, attempts=3, on_retry=told.append, retry_lost=False)
    with pytest.raises(TRANSPORT_ERRORS) as failed:
        caller.post(f"http://127.0.0.1:{port}/", timeout=20)
    assert [one.attempt for one in told] == [1, 2]
    assert {one.why.partition(":")[0] for one in told} == {"unsent"}
    assert "3 attempts" in failed.value.__notes__[0]
    assert "was not sent" in failed.value.__notes__[0]


def test_a_wrong_certificate_is_not_tried_again(library: Library, tmp_path: Path) -> None:
    told: list[Any] = []
    with tls_server(tmp_path) as url, pytest.raises(TRANSPORT_ERRORS, match=r"(?i)certificate"):
        Caller(library, certificates=True, on_retry=told.append).post(url)
    assert told == []


def hang_up_on(listener: socket.socket, callers: int) -> int:
    for _ in range(callers):
        listener.accept()[0].close()
    return callers


def test_a_handshake_that_is_cut_is_tried_again(library: Library) -> None:
    told: list[Any] = []
    with socket.create_server(("127.0.0.1", 0)) as listener, ThreadPoolExecutor(1) as pool:
        listener.settimeout(30)
        calls = pool.submit(hang_up_on, listener, 2)
        with pytest.raises(TRANSPORT_ERRORS):
            Caller(library, attempts=2, on_retry=told.append).post(
                f"https://127.0.0.1:{listener.getsockname()[1]}/"
            )
        assert calls.result() == 2
    assert len(told) == 1


def test_the_last_error_says_what_may_have_happened(library: Library, server: Rogue) -> None:
    server.script = ["lose"] * 2
    with pytest.raises(TRANSPORT_ERRORS) as failed:
        Caller(library, attempts=2).post(server.url)
    assert "may have taken effect" in failed.value.__notes__[0]
    assert str(server.keys[0]) not in failed.value.__notes__[0]
    assert len(server.seen) == 2


def test_a_careful_client_repeats_a_lost_request_only_where_the_key_counts(
    library: Library, server: Rogue
) -> None:
    careful = Caller(library, retry_lost=False)
    server.script = ["lose"]
    with pytest.raises(TRANSPORT_ERRORS):
        careful.post(server.url)
    server.script = [BUSY, "lose"]  # the first answer shows it
    assert careful.post(server.url).report.attempts == 3


# -- answers ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "answer",
    [
        BUSY,
        problem("store-unavailable", 503, retryable=True, Retry_After="0"),
        problem("outcome-pending", 503),
        problem("something-of-theirs", 500, retryable=True),
        Say(425),
        Say(429, {"Retry-After": "0"}),
        Say(409, {"Retry-After": "0"}),
        Say(500, {"Idempotency-Replayed": "false"}),
        Say(500, {"Stripe-Should-Retry": "true"}),
    ],
    ids=["in-progress", "store", "pending", "theirs", "425", "429", "409", "honoured", "stripe"],
)
def test_an_answer_that_is_not_final_is_asked_again(library: Library, server: Rogue, answer: Say) -> None:
    server.script = [answer, answer]
    reply = Caller(library).post(server.url, json={})
    assert (reply.status, reply.report.attempts) == (201, 3)
    once(server)


@pytest.mark.parametrize(
    "answer",
    [
        problem("key-reused", 422),
        problem("store-unavailable", 503, retryable=False),
        Say(500, {"Idempotency-Replayed": "true"}, b"boom"),
        Say(500, {}, b"boom"),
        Say(503, {"Retry-After": "0"}),
        Say(409, {}, b"taken"),
        Say(409, {"Retry-After": "0", "Stripe-Should-Retry": "false"}),
        Say(400),
    ],
    ids=["422", "not-retryable", "replayed", "500", "503", "conflict", "stripe", "400"],
)
def test_a_final_answer_is_handed_over_as_it_is(library: Library, server: Rogue, answer: Say) -> None:
    server.script = [answer]
    reply = Caller(library).post(server.url, json={})
    assert (reply.status, reply.body, reply.report.attempts) == (answer.status, answer.body, 1)
    assert len(server.seen) == 1


def test_a_trusted_server_is_asked_again_after_a_bare_failure(library: Library, server: Rogue) -> None:
    server.script = [Say(500), Say(502), Say(409)]
    assert Caller(library, trusted=True).post(server.url).report.attempts == 4
    server.script = [Say(500)]
    assert Caller(library).post(server.url, wishes={"trusted": True}).status == 201


def test_the_last_answer_is_handed_over_when_attempts_run_out(library: Library, server: Rogue) -> None:
    server.script = [BUSY] * 9
    reply = Caller(library, attempts=3).post(server.url)
    assert (reply.status, reply.body, len(server.seen)) == (409, BUSY.body, 3)


def test_a_compressed_problem_is_understood_and_handed_over(library: Library, server: Rogue) -> None:
    packed = Say(409, {"Content-Type": PROBLEM, "Content-Encoding": "gzip"}, gzip.compress(BUSY.body))
    server.script = [packed, packed]
    reply = Caller(library, attempts=2).post(server.url)
    assert (reply.body, reply.report.attempts) == (BUSY.body, 2)


def test_a_problem_that_is_too_long_to_be_one_is_handed_over_whole(library: Library, server: Rogue) -> None:
    long = Say(503, {"Content-Type": PROBLEM}, b'{"retryable": true, "x": "' + b"y" * 200_000 + b'"}')
    server.script = [long]
    reply = Caller(library).post(server.url)
    assert (reply.body, reply.report.attempts) == (long.body, 1)


# -- pauses -------------------------------------------------------------------------------------------------------------


def test_retry_after_is_waited_for(library: Library, server: Rogue) -> None:
    server.script = [problem("in-progress", 409, Retry_After="1")]
    begun = time.monotonic()
    assert Caller(library).post(server.url).status == 201
    assert time.monotonic() - begun >= 1.0


def test_retry_after_is_capped(library: Library, server: Rogue) -> None:
    told: list[Any] = []
    server.script = [
        Say(429, {"Retry-After": "3600"}),
        Say(429, {"Retry-After": "Fri, 31 Dec 2100 23:59:59 GMT"}),
    ]
    caller = Caller(library, max_wait=0.02, backoff=(0.01, 0.01), on_retry=told.append)
    assert caller.post(server.url).status == 201
    assert all(0.02 <= one.wait <= 0.03 for one in told)
    assert [(one.method, one.host, one.attempt) for one in told] == [("POST", "127.0.0.1", n) for n in (1, 2)]


class _Woken(BaseException):
    """Ends a sleep of ages."""


@pytest.mark.parametrize("library", ["httpx", "requests"])
@pytest.mark.parametrize("asked", ["9" * 20, None], ids=["asked", "backoff"])
def test_a_pause_of_ages_is_slept(library: Library, server: Rogue, asked: str | None) -> None:
    told: list[Any] = []

    def woken(*_: object) -> None:
        raise _Woken

    def about_to_sleep(retrying: Any) -> None:
        told.append(retrying.wait)
        signal.setitimer(signal.ITIMER_REAL, 0.2)

    server.script = [Say(429, {"Retry-After": asked} if asked else {})]
    backoff = (0.01, 0.01) if asked else (1e300, 1e300)
    before = signal.signal(signal.SIGALRM, woken)
    caller = Caller(library, max_wait=math.inf, backoff=backoff, on_retry=about_to_sleep)
    try:
        with pytest.raises(_Woken):
            caller.post(server.url)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    assert told == [1e9]


def test_backoff_is_jittered_and_bounded(server: Rogue) -> None:
    told: list[Any] = []
    server.script = [Say(429)] * 30
    Caller("httpx", attempts=30, backoff=(0.001, 0.004), on_retry=told.append).post(server.url)
    waits = [one.wait for one in told]
    assert waits[0] <= 0.001
    assert max(waits) <= 0.004
    assert len(set(waits)) == len(waits) == 29


def test_no_pause_goes_beyond_the_deadline(library: Library, server: Rogue) -> None:
    server.script = [Say(429, {"Retry-After": "60"})]
    begun = time.monotonic()
    reply = Caller(library, deadline=30).post(server.url)
    assert (reply.status, len(server.seen)) == (429, 1)
    assert time.monotonic() - begun < 20


def test_no_attempt_is_given_more_time_than_the_deadline_leaves(library: Library, server: Rogue) -> None:
    server.script = ["hang"]
    begun = time.monotonic()
    with pytest.raises(TRANSPORT_ERRORS):
        Caller(library).post(server.url, timeout=None, wishes={"deadline": 0.3})
    assert 0.2 < time.monotonic() - begun < 20


# -- retention ----------------------------------------------------------------------------------------------------------


def test_no_attempt_is_made_after_the_advertised_retention(library: Library, server: Rogue) -> None:
    server.script = [problem("in-progress", 409, Retry_After="60", Idempotency_Retention="30")]
    begun = time.monotonic()
    with pytest.raises(RetentionOver, match="keeps a key for 30 s") as over:
        Caller(library).post(server.url)
    assert time.monotonic() - begun < 20, "it is known before the pause"
    assert (over.value.attempts, over.value.key) == (1, server.keys[0])
    assert over.value.key not in str(over.value)


def test_a_retention_that_is_configured_counts_as_well(library: Library, server: Rogue) -> None:
    server.script = [problem("in-progress", 409, Retry_After="3", Idempotency_Retention="60")]
    with pytest.raises(RetentionOver):
        Caller(library, retention=1).post(server.url)
    server.script = ["lose"]
    with pytest.raises(RetentionOver) as over:
        Caller(library).post(server.url, wishes={"retention": 0})
    assert over.value.attempts == 1, "a key that was never sent may be sent"
    assert isinstance(over.value.__cause__, TRANSPORT_ERRORS)


# -- bodies -------------------------------------------------------------------------------------------------------------


def parts(count: int = 3) -> Iterator[bytes]:
    yield from (b"part %d;" % number for number in range(count))


def test_a_body_that_comes_as_a_stream_is_sent_again(library: Library, server: Rogue) -> None:
    server.script = ["lose", "drop"]
    Caller(library).post(server.url, content=parts())
    assert [one.body for one in server.seen] == [b"part 0;part 1;part 2;"] * 3
    assert server.seen[0].headers["transfer-encoding"] == "chunked"
    once(server)


def test_a_stream_that_is_long_is_spooled_to_disk_and_sent_again(library: Library, server: Rogue) -> None:
    server.script = ["lose"]
    Caller(library).post(server.url, content=(b"x" * 400_000 for _ in range(4)))
    assert [len(one.body) for one in server.seen] == [1_600_000] * 2


def test_files_are_sent_again(library: Library, server: Rogue, tmp_path: Path) -> None:
    server.script = ["lose"]
    path = tmp_path / "file"
    path.write_bytes(b"content of a file\nin two lines")
    with path.open("rb") as file:
        Caller(library).post(server.url, files={"upload": file})
    assert server.seen[0].body == server.seen[1].body
    assert b"in two lines" in server.seen[1].body


def test_a_stream_over_the_limit_is_sent_once_and_says_so(library: Library, server: Rogue) -> None:
    caller = Caller(library, max_body=10)
    assert caller.post(server.url, content=parts()).status == 201
    server.script = ["lose"]
    with pytest.raises(BodyNotRepeatable, match="max_body=10") as refused:
        caller.post(server.url, content=parts())
    assert refused.value.key == server.keys[-1]
    assert isinstance(refused.value.__cause__, TRANSPORT_ERRORS)
    server.script = [BUSY]
    assert caller.post(server.url, content=parts()).status == 409, "an answer is handed over, not lost"
    assert {one.body for one in server.seen} == {b"part 0;part 1;part 2;"}


# -- redirects and authentication ---------------------------------------------------------------------------------------


def test_a_redirect_that_keeps_the_method_keeps_the_key(library: Library, server: Rogue) -> None:
    server.script = [Say(307, {"Location": f"{server.url}/there"}), "lose"]
    reply = Caller(library).post(f"{server.url}/here", json={}, follow_redirects=True)
    assert [one.path for one in server.seen] == ["/here", "/there", "/there"]
    assert reply.report.attempts == 3
    once(server)


@pytest.mark.parametrize("word", ["redirect", "challenge"])
def test_a_stream_is_whole_where_a_redirect_leads_to_and_after_a_challenge(
    library: Library, server: Rogue, word: str
) -> None:
    """requests sent what was left of it, which is nothing, and the server acted on an empty request."""
    challenge = Say(401, {"WWW-Authenticate": 'Digest realm="r", nonce="n", qop="auth", algorithm=MD5'})
    server.script = [
        Say(307, {"Location": f"{server.url}/there"}) if word == "redirect" else challenge,
        "lose",
    ]
    auth = requests.auth.HTTPDigestAuth("a", "b") if library == "requests" else httpx.DigestAuth("a", "b")
    reply = Caller(library).post(f"{server.url}/here", content=parts(), follow_redirects=True, auth=auth)
    assert reply.status == 201
    assert [one.body for one in server.seen] == [b"part 0;part 1;part 2;"] * 3
    once(server)


def test_a_file_is_sent_again_after_a_challenge(server: Rogue, tmp_path: Path) -> None:
    """requests goes back to the file's beginning; the length was told, and nothing sent, until the time was over."""
    server.script = [Say(401, {"WWW-Authenticate": 'Digest realm="r", nonce="n", qop="auth", algorithm=MD5'})]
    path = tmp_path / "file"
    path.write_bytes(b"content")
    with path.open("rb") as file:
        auth = requests.auth.HTTPDigestAuth("a", "b")
        assert Caller("requests").post(server.url, content=file, auth=auth).status == 201
    assert [one.body for one in server.seen] == [b"content"] * 2
    once(server)


@pytest.mark.parametrize("options", [{}, {"max_body": 10}])
def test_a_long_stream_is_not_sent_empty_where_a_redirect_leads_to(
    library: Library, server: Rogue, options: dict[str, Any]
) -> None:
    server.script = [Say(307, {"Location": f"{server.url}/there"})]
    with pytest.raises((BodyNotRepeatable, httpx.StreamConsumed), match="stream"):
        Caller(library, **options).post(
            f"{server.url}/here", content=(b"x" * 400_000 for _ in range(4)), follow_redirects=True
        )
    assert [one.path for one in server.seen] == ["/here"]


def test_the_server_that_a_redirect_leads_to_must_show_again_that_the_key_counts(
    library: Library, server: Rogue
) -> None:
    server.script = [BUSY, Say(307, {"Location": f"{server.url}/there"}), Say(500)]
    reply = Caller(library).post(f"{server.url}/here", json={}, follow_redirects=True)
    assert (reply.status, reply.report.attempts, server.effects) == (500, 3, [])


def test_the_get_that_a_redirect_leads_to_has_no_key(library: Library, server: Rogue) -> None:
    server.script = [Say(303, {"Location": f"{server.url}/result"})]
    reply = Caller(library).post(f"{server.url}/here", json={}, follow_redirects=True)
    assert [(one.method, one.path) for one in server.seen] == [("POST", "/here"), ("GET", "/result")]
    assert server.keys[1] is None
    assert reply.status == 201


def test_an_authentication_round_keeps_the_key(library: Library, server: Rogue) -> None:
    challenge = Say(401, {"WWW-Authenticate": 'Digest realm="r", nonce="n", qop="auth", algorithm=MD5'})
    server.script = [challenge, "lose"]
    auth = requests.auth.HTTPDigestAuth("a", "b") if library == "requests" else httpx.DigestAuth("a", "b")
    assert Caller(library).post(server.url, json={}, auth=auth).status == 201
    assert len(server.seen) == 3
    once(server)


def test_a_request_object_that_is_sent_again_keeps_its_key(server: Rogue) -> None:
    server.script = ["lose"]
    with httpx.Client(transport=IdempotentTransport(attempts=1)) as client:
        request = client.build_request("POST", server.url, json={"n": 1})
        with pytest.raises(httpx.TransportError) as failed:
            client.send(request)
        assert failed.value.request.headers["Idempotency-Key"] == server.keys[0]
        client.send(request)
    once(server)


# -- streams ------------------------------------------------------------------------------------------------------------


def test_a_response_can_be_streamed(server: Rogue) -> None:
    with httpx.Client(transport=IdempotentTransport(max_response=0)) as client:
        with client.stream("POST", server.url) as response:
            assert response.is_stream_consumed is False
            assert b"".join(response.iter_bytes()) == b'{"effect": 1}'
        assert client.post(server.url).elapsed.total_seconds() > 0
    with requests.Session() as session:
        session.mount("http://", IdempotentAdapter())
        with session.post(server.url, stream=True, timeout=5) as streamed:
            assert b"".join(streamed.iter_content()) == b'{"effect": 3}'


# -- mistakes -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "options, words",
    [
        ({"atempts": 3}, "did you mean 'attempts'"),
        ({"attempts": 0}, "attempts must be"),
        ({"backoff": 3}, "backoff must be a pair"),
        ({"backoff": (3, 1)}, "begin with the shorter"),
        ({"methods": 7}, "methods must be a list"),
        ({"methods": ""}, "methods is empty"),
        ({"methods": "POST,PATCH"}, "which is no method"),
        ({"methods": ["POST, PATCH"]}, "which is no method"),
        ({"methods": []}, "methods is empty"),
        ({"header": "a b"}, "header must be the name"),
        ({"trusted": "yes"}, "trusted must be True or False"),
        ({"key": "k"}, "key must be a function"),
        ({"deadline": -1}, "deadline must be"),
        ({"max_body": -1}, "max_body must be"),
        ({"max_wait": "x"}, "max_wait must be seconds"),
    ],
)
def test_a_wrong_option_is_refused_by_name(library: Library, options: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigurationError, match=words):
        Caller(library, **options).post("http://127.0.0.1:9/")


@pytest.mark.parametrize(
    "wishes, words",
    [
        ({"attempt": 3}, "did you mean 'attempts'"),
        ({"key": "a", "action": "b"}, "not both"),
        ({"action": "b"}, "needs a store"),
        ({"enabled": 1}, "enabled must be True or False"),
        ({"deadline": "x"}, "deadline must be seconds"),
    ],
)
def test_a_wrong_wish_is_refused_before_anything_is_sent(
    library: Library, server: Rogue, wishes: dict[str, Any], words: str
) -> None:
    with pytest.raises(ConfigurationError, match=words):
        Caller(library).post(server.url, wishes=wishes)
    assert server.seen == []


@pytest.mark.parametrize("key", ["", "two words", "k" * 256, "ü", 'quo"te', "a,b", "line\nbreak"])
def test_a_malformed_key_is_refused_and_not_echoed(library: Library, server: Rogue, key: str) -> None:
    for caller, wishes in ((Caller(library), {"key": key}), (Caller(library, key=lambda _: key), None)):
        with pytest.raises(InvalidKey) as refused:
            caller.post(server.url, wishes=wishes)
        assert not key or key not in str(refused.value)
    assert server.seen == []


def test_a_key_for_a_method_that_takes_none_is_refused_in_httpx(server: Rogue) -> None:
    with (
        httpx.Client(transport=IdempotentTransport()) as client,
        pytest.raises(ConfigurationError, match="add it there"),
    ):
        client.get(server.url, extensions={"semel": {"key": "k"}})


def test_a_key_by_header_and_by_option_is_refused(server: Rogue) -> None:
    with (
        httpx.Client(transport=IdempotentTransport()) as client,
        pytest.raises(ConfigurationError, match="not both"),
    ):
        client.post(server.url, headers={"Idempotency-Key": "a"}, extensions={"semel": {"key": "k"}})


def test_a_block_serves_httpx_too_and_the_request_itself_wins(server: Rogue) -> None:
    with httpx.Client(transport=IdempotentTransport()) as client, sending(key="outer", attempts=1):
        client.post(server.url)
        client.post(server.url, extensions={"semel": {"key": "inner"}})
        client.get(server.url)
        with sending(key="nested"):
            client.post(server.url)
    assert server.keys == ["outer", "inner", None, "nested"]


def test_a_transport_of_the_other_colour_is_refused() -> None:
    with pytest.raises(ConfigurationError, match=r"httpx\.Client, not AsyncHTTPTransport"):
        IdempotentTransport(httpx.AsyncHTTPTransport())  # type: ignore[arg-type]  # wrong on purpose


def test_retries_below_the_key_are_refused() -> None:
    with pytest.raises(ConfigurationError, match="attempts="):
        IdempotentAdapter(pool={"max_retries": 3})
