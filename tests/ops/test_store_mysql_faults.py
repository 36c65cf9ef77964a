"""The MariaDB/MySQL store when the network, the server or its operator fails: bounded, told apart, never twice."""

from __future__ import annotations

import asyncio
import multiprocessing
import socket
import ssl
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from datetime import UTC, datetime, timedelta
from ipaddress import ip_address
from pathlib import Path
from typing import Any

import pytest

from semel.errors import ConfigurationError, StoreUnavailable
from semel.model import Answer, Kind, Note, Replay, State, Won
from semel.runtime import run_sync
from semel.store import Query, Settings
from semel.stores import mysql
from semel.stores.mysql import MysqlStore
from semel.stores.mysql.address import parse
from semel.stores.mysql.pools import url_pool
from semel.stores.mysql.wires import _connection_class, dial_pymysql
from semel.testing import services
from semel.testing.proxy import Action, Proxy
from tests.ops.mysql_lab import COLOURS, Colour, ask, beat, drive, end, hurried, race, scope, using, win

pytestmark = pytest.mark.filterwarnings("error")
SLACK = 15  # seconds that a loaded machine may add to a time-out


@pytest.fixture(params=COLOURS)
def colour(request: pytest.FixtureRequest) -> Colour:
    return "sync" if request.param == "sync" else "async"


@pytest.fixture
def url(mariadb_server: services.MariaServer) -> str:
    return mariadb_server.database()


@pytest.fixture(scope="module")
def spare() -> Iterator[services.MariaServer]:
    with services.mariadb() as server:
        yield server


@pytest.fixture
def own(spare: services.MariaServer) -> services.MariaServer:
    """A server that may be killed, paused and reconfigured; each test leaves it as it was."""
    if not spare.running:
        spare.restart()
    return spare


@pytest.fixture
def proxy(mariadb_server: services.MariaServer) -> Iterator[Proxy]:
    with Proxy(mariadb_server.host, mariadb_server.port) as between:
        yield between


@pytest.fixture
def through(proxy: Proxy, url: str) -> str:
    return f"mysql://root@{proxy.host}:{proxy.port}/{url.rpartition('/')[2]}"


def bounded(seconds: float) -> Callable[[], None]:
    """Call the result to check that no more than `seconds` have passed."""
    start = time.monotonic()

    def check() -> None:
        assert time.monotonic() - start < seconds + SLACK

    return check


# ---------------------------------------------------------------------------------------- refused at first use


def test_an_unreachable_server_is_unavailable_at_once(colour: Colour) -> None:
    check = bounded(0.5)
    with pytest.raises(StoreUnavailable, match="is the server running") as caught:
        using(colour, "mysql://root@127.0.0.1:1/d", win, timeout=60)
    assert caught.value.__cause__ is not None
    check()


def test_a_server_that_accepts_and_says_nothing_is_unavailable_in_time(colour: Colour) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        check = bounded(0.5)
        with pytest.raises(StoreUnavailable):
            using(colour, f"mysql://root@127.0.0.1:{silent.getsockname()[1]}/d", win, timeout=0.5)
        check()


@pytest.mark.parametrize(
    "user, password, message",
    [
        ("app", "wrong", "check user and password"),
        ("nobody", "x", "check user and password"),
        ("app", "", "password"),
    ],
)
def test_a_wrong_login_is_refused_with_the_remedy(
    colour: Colour, url: str, mariadb_server: services.MariaServer, user: str, password: str, message: str
) -> None:
    mariadb_server.execute("CREATE USER IF NOT EXISTS app@'%' IDENTIFIED BY 'right'")
    wrong = url.replace("root@", f"{user}:{password}@")
    with pytest.raises(ConfigurationError, match=message) as caught:
        using(colour, wrong, win)
    assert password not in str(caught.value) or not password


def test_a_password_may_have_any_character(
    colour: Colour, url: str, mariadb_server: services.MariaServer
) -> None:
    mariadb_server.execute("CREATE USER IF NOT EXISTS odd@'%' IDENTIFIED BY 'pä€:/@#'")
    mariadb_server.execute("GRANT ALL ON *.* TO odd@'%'")
    using(colour, url.replace("root@", "odd:p%C3%A4%E2%82%AC%3A%2F%40%23@"), win)


def test_a_missing_database_is_refused_with_the_remedy(
    colour: Colour, mariadb_server: services.MariaServer
) -> None:
    with pytest.raises(ConfigurationError, match="create it, or correct the URL"):
        using(colour, mariadb_server.url_of("nowhere"), win)


def test_missing_rights_are_refused_with_the_grant(
    colour: Colour, url: str, mariadb_server: services.MariaServer
) -> None:
    name = url.rpartition("/")[2]
    user = f"reader_{name}"
    mariadb_server.execute(f"CREATE USER {user}@'%'")
    mariadb_server.execute(f"GRANT SELECT ON {name}.* TO {user}@'%'")
    reader = url.replace("root@", f"{user}@")
    with pytest.raises(ConfigurationError, match="GRANT SELECT, INSERT, UPDATE, DELETE"):
        using(colour, reader, win)
    using(colour, url, win)
    with pytest.raises(ConfigurationError, match="GRANT"):
        using(colour, reader, lambda store: win(store, "other"))


def test_a_table_of_somebody_else_is_refused(
    colour: Colour, url: str, mariadb_server: services.MariaServer
) -> None:
    using(colour, url, win)
    mariadb_server.execute("ALTER TABLE semel DROP COLUMN labels", database=url.rpartition("/")[2])
    with pytest.raises(ConfigurationError, match="lacks a column"):
        using(colour, url, win)


# ---------------------------------------------------------------------------------------- lost in the middle

FAULTS = (Action.SWALLOW_REPLY, Action.RESET_BEFORE, Action.BLACKHOLE, Action.HALF_CLOSE)


def time_for(action: Action) -> float:
    """Half of it is spent on waiting where nothing is said; the other faults are noticed at once."""
    return 3 if action is Action.BLACKHOLE else 30


@pytest.mark.parametrize("action", FAULTS)
@pytest.mark.parametrize("word", [b"LEFT JOIN", b"INSERT INTO"])
def test_R16_a_claim_whose_request_or_reply_is_lost_is_won_once(
    colour: Colour, proxy: Proxy, through: str, url: str, action: Action, word: bytes
) -> None:
    async def body(store: MysqlStore) -> None:
        await store.peek(scope("warm"))
        rule = proxy.rule(action, match=lambda request: word in request)
        with hurried(store, time_for(action)):
            mine = await win(store)
        assert rule.fired.is_set()
        record, _ = await store.peek(mine.scope)
        assert record is not None
        assert (record.nonce, record.attempts, record.state) == (mine.nonce, 1, State.RUNNING)

    using(colour, through, body, timeout=30)


@pytest.mark.parametrize("action", FAULTS)
@pytest.mark.parametrize("count", [1, 3])
def test_R16_a_settle_whose_request_or_reply_is_lost_is_stored_once(
    colour: Colour, proxy: Proxy, through: str, action: Action, count: int
) -> None:
    async def body(store: MysqlStore) -> None:
        asks = [await win(store, f"key-{n}") for n in range(count)]
        rule = proxy.rule(action, match=lambda request: b"UPDATE" in request)
        with hurried(store, time_for(action)):
            assert await store.settle([end(one, result=b"r") for one in asks]) == [Answer.OK] * count
        assert rule.fired.is_set()
        (verdict,) = await store.claim([ask("key-0")])
        assert isinstance(verdict, Replay)

    using(colour, through, body, timeout=30)


@pytest.mark.parametrize("action", FAULTS)
def test_renewals_notes_and_words_survive_a_lost_reply(
    colour: Colour, proxy: Proxy, through: str, action: Action
) -> None:
    async def body(store: MysqlStore) -> None:
        mine = await win(store)
        with hurried(store, time_for(action)):
            proxy.rule(action, match=lambda request: b"UPDATE" in request)
            assert await store.renew([beat(mine)]) == [Answer.OK]
            proxy.rule(action, match=lambda request: b"UPDATE" in request)
            assert await store.note(Note(mine.scope, mine.nonce, b"step")) is Answer.OK
            await store.settle([end(mine, Kind.UNKNOWN)])
            rule = proxy.rule(action, match=lambda request: b"START TRANSACTION" in request)
            word = end(mine, nonce=b"", new_nonce=b"w" * 16, actor="ada", reason="saw it")
            assert await store.settle([word]) == [Answer.OK]
        assert rule.fired.is_set()

    using(colour, through, body, timeout=30)


def test_R7_a_word_whose_answer_nobody_takes_is_in_the_trail(
    colour: Colour, proxy: Proxy, through: str
) -> None:
    """Of a transaction in one packet each statement is answered by itself, also where the client is gone by then."""

    async def body(store: MysqlStore) -> None:
        for number in range(10):
            mine = await win(store, f"k{number}")
            await store.settle([end(mine, Kind.UNKNOWN)])
            word = end(mine, nonce=b"", new_nonce=bytes([number]) * 16, actor="ada", reason=f"lost-{number}")
            lost = proxy.swallow_reply(match=lambda request: b"lost-" in request)
            assert await store.settle([word]) == [Answer.OK]
            assert lost.fired.is_set()
            assert len((await store.scan(Query(history=mine.scope))).events) == 1, number

    using(colour, through, body, timeout=60)


def test_an_answer_that_never_comes_is_unavailable_in_time(
    colour: Colour, proxy: Proxy, through: str
) -> None:
    async def body(store: MysqlStore) -> None:
        mine = await win(store)
        for _ in range(2):
            proxy.blackhole(match=lambda request: b"UPDATE" in request)
        check = bounded(0.6)
        with hurried(store, 0.6), pytest.raises(StoreUnavailable, match="did not answer"):
            await store.settle([end(mine)])
        check()
        assert await store.settle([end(mine)]) == [Answer.OK]

    using(colour, url_timeouts(through), body, timeout=30)


def url_timeouts(through: str) -> str:
    return f"{through}?pool=2"


def test_a_slow_drip_of_a_reply_is_read_to_its_end(colour: Colour, proxy: Proxy, through: str) -> None:
    async def body(store: MysqlStore) -> None:
        mine = await win(store)
        await store.settle([end(mine, result=b"r" * 200)])
        proxy.drip(match=lambda request: b"LEFT JOIN" in request)
        (verdict,) = await store.claim([ask()])
        assert isinstance(verdict, Replay)
        assert verdict.record.result == b"r" * 200

    using(colour, through, body, timeout=10)


def test_idle_connections_that_the_server_closed_are_replaced_unseen(
    colour: Colour, url: str, own: services.MariaServer
) -> None:
    del url

    async def body(store: MysqlStore) -> None:
        mine = await win(store)
        for _ in range(3):
            assert own.terminate_connections() >= 1
            assert await store.renew([beat(mine)]) == [Answer.OK]
        assert own.terminate_connections() >= 1
        assert await store.settle([end(mine)]) == [Answer.OK]

    using(colour, own.database(), body)


def test_a_connection_known_to_be_dead_is_not_used(own: services.MariaServer) -> None:
    async def body(store: MysqlStore) -> None:
        mine = await win(store)
        idle = await store._pool.take(time.monotonic() + 5, fresh=False)
        await store._pool.give(idle)
        own.terminate_connections()
        while idle.wire.alive:
            await asyncio.sleep(0.001)
        session = await store._pool.take(time.monotonic() + 5, fresh=False)
        assert session is not idle
        await store._pool.give(session)
        assert await store.settle([end(mine)]) == [Answer.OK]

    using("async", own.database(), body)


def test_a_server_killed_between_effect_and_settle_takes_the_settle_when_it_is_back(
    colour: Colour, own: services.MariaServer
) -> None:
    async def body(store: MysqlStore) -> None:
        mine = await win(store)
        own.kill()
        check = bounded(1)
        with hurried(store, 1), pytest.raises(StoreUnavailable):
            await store.settle([end(mine, result=b"r")])
        with hurried(store, 1), pytest.raises(StoreUnavailable):
            await store.claim([ask()])
        check()
        own.restart()
        assert await store.settle([end(mine, result=b"r")]) == [Answer.OK]
        (verdict,) = await store.claim([ask()])
        assert isinstance(verdict, Replay)
        assert verdict.record.attempts == 1

    using(colour, own.database(), body, timeout=30)


def test_a_paused_server_is_unavailable_in_time_and_takes_no_claim_twice(
    colour: Colour, own: services.MariaServer
) -> None:
    async def body(store: MysqlStore) -> None:
        await store.peek(scope())
        mine = ask()
        with own.paused():
            check = bounded(0.5)
            with hurried(store, 0.5), pytest.raises(StoreUnavailable):
                await store.claim([mine])
            check()
        (verdict,) = await store.claim([mine])
        assert isinstance(verdict, Won)
        assert verdict.record.attempts == 1

    using(colour, own.database(), body, timeout=30)


def test_what_the_operator_takes_away_later_is_unavailable_not_misconfigured(
    colour: Colour, own: services.MariaServer
) -> None:
    own.execute("CREATE OR REPLACE USER app@'%'")
    own.execute("GRANT ALL ON *.* TO app@'%'")

    async def body(store: MysqlStore) -> None:
        mine = await win(store)
        own.execute("ALTER USER app@'%' IDENTIFIED BY 'rotated'")
        for (number,) in own.execute("SELECT id FROM information_schema.processlist WHERE user = 'app'"):
            own.execute(f"KILL {number}")
        with pytest.raises(StoreUnavailable, match="check user and password"):
            await store.settle([end(mine)])
        own.execute("ALTER USER app@'%' IDENTIFIED BY ''")
        assert await store.settle([end(mine)]) == [Answer.OK]

    using(colour, own.database().replace("root@", "app@"), body)


def test_a_server_that_became_read_only_names_the_writer(colour: Colour, own: services.MariaServer) -> None:
    own.execute("CREATE OR REPLACE USER app@'%'")
    own.execute("GRANT SELECT, INSERT, UPDATE, DELETE, CREATE ON *.* TO app@'%'")

    async def body(store: MysqlStore) -> None:
        mine = await win(store)
        own.execute("SET GLOBAL read_only = ON")
        with pytest.raises(StoreUnavailable, match="must name the writer"):
            await store.settle([end(mine)])
        own.execute("SET GLOBAL read_only = OFF")
        assert await store.settle([end(mine)]) == [Answer.OK]

    using(colour, own.database().replace("root@", "app@"), body)


def test_a_server_without_free_connections_is_unavailable_with_the_remedy(colour: Colour) -> None:
    import pymysql

    with services.mariadb(config={"max-connections": 10}) as server:
        url = server.database()
        server.execute("CREATE USER app@'%'")
        server.execute("GRANT ALL ON db1.* TO app@'%'")
        taken: list[pymysql.Connection] = []
        try:
            with pytest.raises(pymysql.err.OperationalError):
                while True:
                    taken.append(
                        pymysql.connect(host=server.host, port=server.port, user="app", database="db1")
                    )
            with pytest.raises(StoreUnavailable, match="max_connections"):
                using(colour, url.replace("root@", "app@"), win)
        finally:
            for connection in taken:
                connection.close()


def test_a_cancelled_verb_costs_its_connection_only(proxy: Proxy, through: str) -> None:
    async def body(store: MysqlStore) -> None:
        mine = await win(store)
        for _ in range(3):
            rule = proxy.stall(match=lambda request: b"LEFT JOIN" in request)
            task = asyncio.create_task(store.peek(mine.scope))
            await asyncio.to_thread(rule.fired.wait, 5)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
        assert (await store.peek(mine.scope))[0] is not None
        assert await store.settle([end(mine)]) == [Answer.OK]

    using("async", f"{through}?pool=1", body)


def test_a_connection_that_cannot_be_set_up_is_not_kept(colour: Colour, proxy: Proxy, through: str) -> None:
    async def body(store: MysqlStore) -> None:
        for _ in range(2):
            proxy.reset_before(match=lambda request: b"SET SESSION sql_mode" in request)
        with pytest.raises(StoreUnavailable):
            await win(store)
        await win(store)

    using(colour, f"{through}?pool=1", body)


# ---------------------------------------------------------------------------------------- processes


def test_of_many_processes_exactly_one_wins_each_key(url: str) -> None:
    spawn = multiprocessing.get_context("spawn")
    gate, won = spawn.Barrier(4), spawn.Queue()
    processes = [spawn.Process(target=race, args=(url, gate, won)) for _ in range(4)]
    for process in processes:
        process.start()
    winners = [key for _ in processes for key in won.get(timeout=60)]
    for process in processes:
        process.join(30)
        assert process.exitcode == 0
    assert sorted(winners) == sorted({f"{kind}-{n}" for kind in ("key", "batch") for n in range(60)})


# ---------------------------------------------------------------------------------------- TLS


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with ca.pem, other.pem, server.pem and server.key, for the address 127.0.0.1."""
    folder = tmp_path_factory.mktemp("tls")
    from cryptography import x509
    from cryptography.hazmat.primitives import hashes, serialization
    from cryptography.hazmat.primitives.asymmetric import ec
    from cryptography.x509.oid import NameOID

    def certificate(
        name: str,
        key: ec.EllipticCurvePrivateKey,
        issuer: str,
        signer: ec.EllipticCurvePrivateKey,
        *,
        ca: bool,
    ) -> bytes:
        now = datetime.now(UTC)
        builder = (
            x509.CertificateBuilder()
            .subject_name(x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)]))
            .issuer_name(x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, issuer)]))
            .public_key(key.public_key())
            .serial_number(x509.random_serial_number())
            .not_valid_before(now - timedelta(days=1))
            .not_valid_after(now + timedelta(days=1))
            .add_extension(x509.BasicConstraints(ca=ca, path_length=None), critical=True)
            .add_extension(
                x509.SubjectAlternativeName([x509.IPAddress(ip_address("127.0.0.1"))]), critical=False
            )
        )
        return builder.sign(signer, hashes.SHA256()).public_bytes(serialization.Encoding.PEM)

    root, other, server = (ec.generate_private_key(ec.SECP256R1()) for _ in range(3))
    (folder / "ca.pem").write_bytes(certificate("root", root, "root", root, ca=True))
    (folder / "other.pem").write_bytes(certificate("other", other, "other", other, ca=True))
    (folder / "server.pem").write_bytes(certificate("server", server, "root", root, ca=False))
    (folder / "server.key").write_bytes(
        server.private_bytes(
            serialization.Encoding.PEM,
            serialization.PrivateFormat.TraditionalOpenSSL,
            serialization.NoEncryption(),
        )
    )
    return folder


@pytest.fixture(scope="module")
def tls_server(authority: Path) -> Iterator[services.MariaServer]:
    server = services.MariaServer(config={"require-secure-transport": "OFF"})
    for name in ("ca.pem", "server.pem", "server.key"):
        (server.folder / name).write_bytes((authority / name).read_bytes())
    for option, name in (("ssl-ca", "ca.pem"), ("ssl-cert", "server.pem"), ("ssl-key", "server.key")):
        server.config[option] = str(server.folder / name)
    services.home.give(server.folder)
    with server.open():
        yield server


def test_tls_verifies_the_server_by_its_authority(
    colour: Colour, tls_server: services.MariaServer, authority: Path
) -> None:
    url = tls_server.database()

    async def body(store: MysqlStore) -> str:
        async def cipher(table: object) -> str:
            session = table.session  # type: ignore[attr-defined]  # what is borrowed is declared as an object
            return str((await session.query("SHOW STATUS LIKE 'Ssl_cipher'"))[0][1])

        await win(store)
        await store.settle([end(await win(store, "big"), result=b"x" * 300_000)])
        (verdict,) = await store.claim([ask("big")])
        assert isinstance(verdict, Replay)
        assert len(verdict.record.result) == 300_000
        return await store._run(cipher)

    assert using(colour, f"{url}?ssl_ca={authority / 'ca.pem'}", body)
    again = f"{tls_server.database()}?ssl_ca={authority / 'ca.pem'}&ssl_verify=ca"
    assert using(colour, again, body)
    assert using(colour, f"{tls_server.database()}?ssl=true&ssl_verify=none", body)
    with pytest.raises(ConfigurationError, match="ssl_ca"):
        using(colour, f"{url}?ssl_ca={authority / 'other.pem'}", win)


@pytest.mark.parametrize("query,contexts,encrypted", [("", 0, False), ("?ssl=true&ssl_verify=none", 1, True)])
def test_a_pool_makes_one_tls_context_and_none_when_it_needs_none(
    tls_server: services.MariaServer,
    monkeypatch: pytest.MonkeyPatch,
    query: str,
    contexts: int,
    encrypted: bool,
) -> None:
    address = parse(tls_server.database() + query, "sync")
    made = _counted_contexts(monkeypatch)
    pool = url_pool(address)

    async def main() -> None:
        taken = [await pool.take(time.monotonic() + 5, fresh=False) for _ in range(3)]
        ciphers = [(await session.query("SHOW STATUS LIKE 'Ssl_cipher'"))[0][1] for session in taken]
        assert [bool(cipher) for cipher in ciphers] == [encrypted] * 3
        for session in taken:
            await pool.give(session)
        await pool.aclose()

    run_sync(main())
    assert len(made) == contexts


def test_a_server_elsewhere_is_spoken_to_in_tls_if_it_can_by_one_context(
    tls_server: services.MariaServer, url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    there = tls_server.database()
    monkeypatch.setattr(_connection_class(), "_unasked", None)
    made = _counted_contexts(monkeypatch)

    def cipher(address: str) -> bool:
        wire = dial_pymysql(parse(address, "sync").options(), "there", 5, prefers_tls=True)
        try:
            ((_, rows),) = run_sync(wire.send(b"SHOW STATUS LIKE 'Ssl_cipher'", 5))
            return bool(rows[0][1])
        finally:
            wire.cut()

    assert [cipher(there), cipher(there), cipher(url)] == [True, True, False]
    assert len(made) == 1


def _counted_contexts(monkeypatch: pytest.MonkeyPatch) -> list[ssl.SSLContext]:
    made: list[ssl.SSLContext] = []
    create = ssl.create_default_context

    def counted(*args: Any, **kwargs: Any) -> ssl.SSLContext:
        made.append(create(*args, **kwargs))
        return made[-1]

    monkeypatch.setattr(ssl, "create_default_context", counted)
    return made


def test_a_server_that_wants_tls_says_so(tls_server: services.MariaServer, authority: Path) -> None:
    url = tls_server.database()
    tls_server.execute("SET GLOBAL require_secure_transport = ON")
    try:
        with pytest.raises(ConfigurationError, match="encrypted connections only"):
            using("async", url, win)
        using("async", f"{url}?ssl_ca={authority / 'ca.pem'}", win)
    finally:
        ca = str(authority / "ca.pem")
        using("sync", f"{url}?ssl_ca={ca}", lambda store: _insecure_again(store))


async def _insecure_again(store: MysqlStore) -> None:
    async def reset(table: object) -> None:
        await table.session.execute("SET GLOBAL require_secure_transport = OFF")  # type: ignore[attr-defined]  # what is borrowed is declared as an object

    await store._run(reset)


def test_a_server_without_tls_is_refused_when_tls_is_asked_for(colour: Colour, url: str) -> None:
    with pytest.raises(ConfigurationError, match="TLS"):
        using(colour, f"{url}?ssl=true&ssl_verify=none", win)


# ---------------------------------------------------------------------------------------- life of a process


def test_a_script_that_never_closes_ends_quietly(colour: Colour, url: str) -> None:
    lines = [
        "import asyncio",
        "from semel import AsyncSemel, Semel",
        f"once = {'Semel' if colour == 'sync' else 'AsyncSemel'}({url!r})",
        "def effect(): return 1",
        "async def main():",
        # -X dev is asyncio's debug mode too, in which a busy machine is told of slow callbacks.
        "    asyncio.get_running_loop().slow_callback_duration = 60",
        "    return (await once.execute('k', effect)).value",
        "print(once.execute('k', effect).value)" if colour == "sync" else "print(asyncio.run(main()))",
    ]
    done = subprocess.run(
        [sys.executable, "-X", "dev", "-W", "error", "-c", "\n".join(lines)],
        check=False,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "1\n", "")


def test_a_half_made_batch_is_finished_when_it_is_sent_again(colour: Colour, url: str) -> None:
    async def main() -> None:
        store = mysql.open_url(url, Settings(timeout=20), colour)
        asks = [ask(f"key-{n}") for n in range(6)]
        await store.claim(asks[:3])
        assert all(isinstance(verdict, Won) for verdict in await store.claim(asks))
        await store.settle([end(one) for one in asks[::2]])
        assert await store.settle([end(one) for one in asks]) == [Answer.OK] * 6
        await store.aclose()

    drive(colour, main)
