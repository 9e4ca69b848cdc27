"""The etcd backend against real servers: lost leaders, lost answers, TLS, users, leases."""

import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from pace import pace
from rallypoint.errors import ConfigError, RendezvousConnectionError
from rallypoint.launch.coordination.journal import Journal
from rallypoint.launch.coordination.journal_reader import Round
from rallypoint.launch.coordination.node_questions import NodeQuestions
from rallypoint.rendezvous.backends import etcd_client, etcd_store as etcd
from rallypoint.rendezvous.backends.etcd_client import EtcdClient, _Failed, encoded
from rallypoint.rendezvous.backends.etcd_store import EtcdStore
from rallypoint.rendezvous.record_store import RecordStore
from rallypoint.rendezvous.records import Codec
from servers.etcd_server import (
    ROOT_PASSWORD,
    Certificates,
    EtcdCluster,
    free_ports,
    require_etcd,
)


pytestmark = pytest.mark.integration


@pytest.fixture(scope="module")
def single(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EtcdCluster]:
    require_etcd()
    cluster = EtcdCluster(tmp_path_factory.mktemp("single"))
    yield cluster
    cluster.stop()


@pytest.fixture
def store(single: EtcdCluster, request: pytest.FixtureRequest) -> Iterator[EtcdStore]:
    store = EtcdStore(endpoints=single.endpoints, prefix=f"jobs/{request.node.name}")
    yield store
    store.close()


@pytest.fixture(scope="module")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Certificates:
    return Certificates(tmp_path_factory.mktemp("certificates"))


@pytest.fixture(scope="module")
def secured(
    tmp_path_factory: pytest.TempPathFactory, certificates: Certificates
) -> Iterator[EtcdCluster]:
    require_etcd()
    cluster = EtcdCluster(tmp_path_factory.mktemp("secured"), certificates=certificates)
    yield cluster
    cluster.stop()


USER, PASSWORD = "job", "pass word"


@pytest.fixture(scope="module")
def guarded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EtcdCluster]:
    """A cluster that requires users; tokens expire after a second without use."""
    require_etcd()
    flags = ("--auth-token-ttl", "1", "--bcrypt-cost", "4")
    cluster = EtcdCluster(tmp_path_factory.mktemp("guarded"), flags=flags)
    cluster.enable_users(USER, PASSWORD, "allowed/")
    yield cluster
    cluster.stop()


def in_threads(*calls) -> None:
    errors: list[BaseException] = []

    def guarded_call(call) -> None:
        try:
            call()
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=guarded_call, args=(call,)) for call in calls]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not errors, errors[0]


def count_requests(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Every request that goes out from now on."""
    sent: list[str] = []
    real_post, real_watch = EtcdClient._post, EtcdClient.watch

    def post(self, member, path, body):
        sent.append(path)
        return real_post(self, member, path, body)

    def watch(self, *args):
        sent.append("/watch")
        return real_watch(self, *args)

    monkeypatch.setattr(EtcdClient, "_post", post)
    monkeypatch.setattr(EtcdClient, "watch", watch)
    return sent


# -- a cluster that loses its members --------------------------------------------------------------


def test_the_leader_dies_during_waits_and_adds_and_counts_stay_exact(tmp_path: Path) -> None:
    require_etcd()
    cluster = EtcdCluster(tmp_path, size=3)
    try:
        first = EtcdStore(endpoints=cluster.endpoints, prefix="jobs/leader")
        adders = [first.clone() for _ in range(6)]
        waiters = [first.clone() for _ in range(3)]
        for member, waiter in enumerate(waiters):
            waiter._client._current = member  # one of them watches at the leader
        sums: list[int] = []
        slots: list[bytes] = []
        under_way = threading.Event()

        def add(mine: EtcdStore, name: int) -> None:
            for turn in range(60):
                sums.append(mine.add("n", 1))
                slots.append(mine.put_new(f"slot/{name}/{turn}", b"%d" % name))
                if len(sums) > 60:
                    under_way.set()

        def wait(mine: EtcdStore) -> None:
            assert mine.get("end", 50.0) == b"over"

        def kill() -> None:
            assert under_way.wait(30)
            cluster.kill(cluster.leader())
            before = len(sums)
            while len(sums) < before + 60:  # it goes on
                assert not threading.Event().wait(0.02)
            first.set("end", b"over")

        calls = [lambda m=m, i=i: add(m, i) for i, m in enumerate(adders)]
        in_threads(*calls, *[lambda m=m: wait(m) for m in waiters], kill)
        assert sorted(sums) == list(range(1, 361))
        assert first.get("n", 1.0) == b"360"
        assert sorted(slots) == sorted(b"%d" % i for i in range(6) for _ in range(60))

        # Without a majority nothing can be said to have happened.
        last, other = [member for member in cluster.members if member.popen is not None]
        lonely = EtcdStore(endpoints=cluster.endpoints, prefix="jobs/leader", patience=1.5)
        watcher = lonely.clone()
        watcher._client._current = cluster.members.index(last)
        ended: list[float] = []

        def wait_alone() -> None:
            with pytest.raises(RendezvousConnectionError):
                watcher.get("never", 60.0)
            ended.append(time.monotonic())

        waiting = threading.Thread(target=wait_alone)
        waiting.start()
        assert not threading.Event().wait(0.3)  # its watch is set up
        cluster.kill(other)
        before = time.monotonic()
        with pytest.raises(RendezvousConnectionError) as caught:
            lonely.add("n", 1)
        assert time.monotonic() - before < 30 * pace()
        for endpoint in cluster.endpoints:
            assert endpoint in str(caught.value)
        assert "has not answered for 1.5 s" in str(caught.value)
        waiting.join(30)  # a lone member would let it wait until the end of the slice
        assert ended and ended[0] - before < 10 * pace()
        for one in (first, lonely, watcher, *adders, *waiters):
            one.close()
    finally:
        cluster.stop()


def test_an_endpoint_that_is_down_is_passed_over(single: EtcdCluster) -> None:
    dead = f"127.0.0.1:{free_ports(1)[0]}"
    for endpoints in ([dead, *single.endpoints], [*single.endpoints, dead]):
        store = EtcdStore(endpoints=endpoints, prefix="jobs/one-down")
        store.set("k", b"v")
        store.close()


def test_nobody_there_is_told_with_the_reason() -> None:
    port = free_ports(1)[0]
    store = EtcdStore(endpoints=[f"127.0.0.1:{port}"], prefix="x", patience=0.3)
    for call in (lambda: store.get("k", 0.1), lambda: store.set("k", b""), store.delete_prefix):
        with pytest.raises(RendezvousConnectionError) as caught:
            call()
        assert f"etcd at 127.0.0.1:{port} has not answered for 0.3 s: connection refused" == str(
            caught.value
        )
    store.close()


def test_what_does_not_speak_etcd_is_told(tmp_path: Path) -> None:
    import http.server

    server = http.server.HTTPServer(("127.0.0.1", 0), http.server.BaseHTTPRequestHandler)
    thread = threading.Thread(target=server.serve_forever)
    http.server.BaseHTTPRequestHandler.log_message = lambda *_: None
    thread.start()
    try:
        endpoint = f"127.0.0.1:{server.server_port}"
        store = EtcdStore(endpoints=[endpoint], prefix="x", patience=0.3)
        with pytest.raises(RendezvousConnectionError, match=endpoint):
            store.set("k", b"v")
        store.close()
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


# -- lost answers ----------------------------------------------------------------------------------


@pytest.fixture
def lossy(store: EtcdStore, monkeypatch: pytest.MonkeyPatch) -> EtcdStore:
    """Every second transaction takes effect, but its answer is lost."""
    real = EtcdClient._post
    turn = [0]

    def post(self, member, path, body):
        answer = real(self, member, path, body)
        if path == "/kv/txn":
            turn[0] += 1
            if turn[0] % 2:
                raise _Failed("the answer was lost")
        return answer

    monkeypatch.setattr(EtcdClient, "_post", post)
    return store


def test_an_add_whose_answer_was_lost_counts_once(lossy: EtcdStore) -> None:
    assert [lossy.add("n", 3) for _ in range(20)] == list(range(3, 63, 3))


def test_adds_of_many_callers_with_lost_answers_are_exact(lossy: EtcdStore) -> None:
    clones = [lossy.clone() for _ in range(4)]
    sums: list[int] = []
    in_threads(*[lambda c=c: sums.extend(c.add("n", 1) for _ in range(15)) for c in clones])
    assert sorted(sums) == list(range(1, 61))
    for clone in clones:
        clone.close()


def test_other_writes_whose_answers_were_lost_say_what_they_did(lossy: EtcdStore) -> None:
    assert lossy.put_new("k", b"mine") == b"mine"
    assert lossy.put_new("k", b"other") == b"mine"
    assert lossy.compare_set("k", b"mine", b"next") == b"next"
    assert lossy.compare_set("k", b"mine", b"more") == b"next"
    assert lossy.delete("k") and not lossy.delete("k")
    lossy.set("k", b"1")
    assert lossy.get("k", 1.0) == b"1"


def test_a_repeated_set_does_not_undo_what_came_after_it(
    store: EtcdStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = store.clone()
    real = EtcdClient._post
    lost = []

    def post(self, member, path, body):
        answer = real(self, member, path, body)
        if self is store._client and not lost:
            lost.append(path)
            other.set("k", b"later")
            raise _Failed("the answer was lost")
        return answer

    monkeypatch.setattr(EtcdClient, "_post", post)
    store.set("k", b"first")
    assert store.get("k", 1.0) == b"later"
    other.close()


def test_after_an_unknown_outcome_the_next_operation_is_not_taken_for_the_last(
    single: EtcdCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = EtcdStore(endpoints=single.endpoints, prefix="jobs/unknown", patience=0.2)
    real = EtcdClient._post

    def post(self, member, path, body):
        real(self, member, path, body)
        raise _Failed("the answer was lost")

    with monkeypatch.context() as patched:
        patched.setattr(EtcdClient, "_post", post)
        with pytest.raises(RendezvousConnectionError, match="the answer was lost"):
            store.add("n", 5)
    assert store.add("n", 1) == 6
    assert store.put_new("k", b"v") == b"v" == store.get("k", 1.0)
    store.close()


# -- counters --------------------------------------------------------------------------------------


def test_64_callers_at_once_cost_one_request_each(
    single: EtcdCluster, store: EtcdStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    clones = [store.clone() for _ in range(64)]
    sums: list[int] = []
    sent = count_requests(monkeypatch)
    in_threads(*[lambda c=c: sums.append(c.add("n", 1)) for c in clones])
    assert sorted(sums) == list(range(1, 65))
    assert sent == ["/kv/txn"] * 64
    for clone in clones:
        clone.close()


def test_any_mixture_of_amounts_is_summed(single: EtcdCluster, store: EtcdStore) -> None:
    chosen = random.Random(7)
    amounts = [chosen.choice([0, 1, -1, chosen.randint(-(2**40), 2**40)]) for _ in range(150)]
    total = 0
    for amount in amounts:
        total += amount
        assert store.add("n", amount) == total
    assert store.get("n", 1.0) == b"%d" % total
    # However often it is incremented, what etcd holds for it stays small.
    keys = [key for key in single.keys("jobs/test_any_mixture") if "/n=" in key]
    assert len(keys) <= 2 * 63 + 1
    assert store.delete("n") and not store.exists("n") and store.add("n", -1) == -1


def test_a_counter_can_be_set_and_text_cannot_be_added_to(store: EtcdStore) -> None:
    store.add("n", 5)
    store.set("n", b"100")
    assert store.add("n", 1) == 101
    assert store.put_new("n", b"0") == b"101"
    with pytest.raises(ValueError, match="more than 64 bits"):
        store.add("n", 2**63)
    store.set("n", b"text")
    with pytest.raises(ValueError, match="'n' is not a counter: it holds b'text'"):
        store.add("n", 1)
    assert store.get("n", 1.0) == b"text"


def test_keys_of_any_characters_do_not_mix(single: EtcdCluster, store: EtcdStore) -> None:
    names = ["a", "a=", "a=+00", "a/", "a/:lease", ":writer/x", "ä\x00\n%3D", "", "k" * 512]
    for number, name in enumerate(names):
        store.add(name, number + 1)
    assert store.get_many(names) == [b"%d" % (number + 1) for number in range(len(names))]
    assert store.num_keys() == len(names)
    neighbour = EtcdStore(endpoints=single.endpoints, prefix="jobs/test_keys_of_any")
    assert neighbour.get_many(names) == [None] * len(names)
    neighbour.set("a", b"stays")
    store.delete_prefix()
    assert store.num_keys() == 0 and neighbour.get("a", 1.0) == b"stays"
    assert store.add("a", 1) == 1  # the connection goes on
    neighbour.close()


# -- waiting ---------------------------------------------------------------------------------------


def test_a_wait_is_one_read_and_one_watch(
    store: EtcdStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = store.clone()
    sent = count_requests(monkeypatch)

    def add_when_it_watches() -> None:
        deadline = time.monotonic() + 30.0 * pace()
        while "/watch" not in sent and time.monotonic() < deadline:
            time.sleep(0.01)
        other.add("later", 41)

    adding = threading.Thread(target=add_when_it_watches)
    adding.start()
    assert store.get("later", 60.0 * pace()) == b"41"
    adding.join()
    assert sorted(sent) == ["/kv/range", "/kv/txn", "/watch"]
    other.close()


def test_a_key_set_between_the_read_and_the_watch_is_not_missed(
    store: EtcdStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = store.clone()
    real = EtcdClient.watch

    def watch(self, *args):
        other.set("k", b"between")
        return real(self, *args)

    monkeypatch.setattr(EtcdClient, "watch", watch)
    before = time.monotonic()
    assert store.get("k", 60.0) == b"between"
    assert time.monotonic() - before < 30 * pace()
    other.close()


def test_a_wait_survives_the_restart_of_the_only_member(tmp_path: Path) -> None:
    require_etcd()
    cluster = EtcdCluster(tmp_path)
    try:
        store = EtcdStore(endpoints=cluster.endpoints, prefix="jobs/restart")
        waiter = store.clone()

        def restart() -> None:
            cluster.kill(cluster.members[0])
            cluster.start(cluster.members[0])
            store.set("k", b"v")

        def wait() -> None:
            assert waiter.get("k", 30.0) == b"v"

        in_threads(wait, restart)
        store.close()
        waiter.close()
    finally:
        cluster.stop()


# -- TLS -------------------------------------------------------------------------------------------


def test_tls_with_a_client_certificate(secured: EtcdCluster, certificates: Certificates) -> None:
    store = EtcdStore(
        endpoints=secured.endpoints,
        prefix="jobs/tls",
        ca_cert=certificates.path("ca.pem"),
        cert=certificates.path("client.pem"),
        key=certificates.path("client.key"),
    )
    other = store.clone()
    timer = threading.Timer(0.2, lambda: other.set("k", b"v"))
    timer.start()
    assert store.get("k", 10.0) == b"v"
    timer.join()
    store.close()
    other.close()


@pytest.mark.parametrize(
    ("ca", "cert", "expected"),
    [
        ("stranger", "client", "TLS: its certificate is not trusted"),
        ("ca", None, "TLS: it asks for a client certificate"),
        ("ca", "intruder", "TLS: it refuses our certificate"),
    ],
    ids=["wrong-ca", "no-client-certificate", "certificate-of-a-stranger"],
)
def test_tls_that_cannot_work_is_told_at_once(
    secured: EtcdCluster,
    certificates: Certificates,
    ca: str,
    cert: str | None,
    expected: str,
) -> None:
    store = EtcdStore(
        endpoints=secured.endpoints,
        prefix="jobs/tls",
        ca_cert=certificates.path(f"{ca}.pem"),
        cert=None if cert is None else certificates.path(f"{cert}.pem"),
        key=None if cert is None else certificates.path(f"{cert}.key"),
    )
    before = time.monotonic()
    with pytest.raises(RendezvousConnectionError, match=expected) as caught:
        store.set("k", b"v")
    assert time.monotonic() - before < 30 * pace()
    assert secured.endpoints[0] in str(caught.value) and "\n" not in str(caught.value)
    store.close()


def test_a_refused_certificate_is_told_where_only_the_cut_is_seen(
    secured: EtcdCluster, certificates: Certificates, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whether the refusal is read before writing fails is a matter of timing; here it never is."""

    def request(*_args):
        raise _Failed("eof occurred", cut=True)

    monkeypatch.setattr(etcd_client, "_request", request)
    ca = certificates.path("ca.pem")
    store = EtcdStore(endpoints=secured.endpoints, prefix="jobs/tls", ca_cert=ca)
    with pytest.raises(RendezvousConnectionError, match="TLS: it asks for a client certificate"):
        store.set("k", b"v")
    store.close()


def test_plain_http_to_a_tls_port_is_told(secured: EtcdCluster) -> None:
    store = EtcdStore(endpoints=secured.endpoints, prefix="jobs/tls", patience=0.3)
    with pytest.raises(RendezvousConnectionError, match=r"TLS on one side only\?"):
        store.set("k", b"v")
    store.close()


# -- users -----------------------------------------------------------------------------------------


def test_a_user_with_the_right_password(guarded: EtcdCluster) -> None:
    store = EtcdStore(
        endpoints=guarded.endpoints, prefix="allowed/job", user=USER, password=PASSWORD
    )
    assert store.add("n", 1) == 1 and store.get("n", 1.0) == b"1"
    store.close()


@pytest.mark.parametrize(
    ("prefix", "user", "password", "expected"),
    [
        ("allowed/job", USER, "wr0ng", "the user 'job' or the password is wrong"),
        ("allowed/job", "nobody", "wr0ng", "the user 'nobody' or the password is wrong"),
        ("allowed/job", None, None, "it asks for a user and a password"),
        ("elsewhere", USER, PASSWORD, "it denies access to the user 'job'"),
    ],
    ids=["wrong-password", "unknown-user", "no-user", "not-allowed"],
)
def test_a_user_who_may_not_is_told_at_once(
    guarded: EtcdCluster, prefix: str, user: str | None, password: str | None, expected: str
) -> None:
    store = EtcdStore(endpoints=guarded.endpoints, prefix=prefix, user=user, password=password)
    before = time.monotonic()
    for call in (lambda: store.set("k", b"v"), lambda: store.get("k", 5.0)):
        with pytest.raises(RendezvousConnectionError, match=expected) as caught:
            call()
        assert "\n" not in str(caught.value) and (password or "-") not in str(caught.value)
    assert time.monotonic() - before < 30 * pace()
    store.close()


@pytest.mark.long
def test_an_expired_token_is_renewed(guarded: EtcdCluster, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(etcd, "WATCH_SLICE", 1.5)  # each new watch finds the token expired
    store = EtcdStore(
        endpoints=guarded.endpoints, prefix="allowed/token", user=USER, password=PASSWORD
    )
    store.set("k", b"v")
    token = store._client._token
    root = EtcdStore(
        endpoints=guarded.endpoints, prefix="allowed/token", user="root", password=ROOT_PASSWORD
    )
    timer = threading.Timer(4.0, lambda: root.set("later", b"here"))
    timer.start()
    assert store.get("later", 10.0) == b"here"
    timer.join()
    assert store.add("n", 1) == 1
    assert store._client._token != token
    store.close()
    root.close()


# -- leases ----------------------------------------------------------------------------------------

JOB = """
import sys, threading
from rallypoint.rendezvous.backends.etcd_store import EtcdStore
store = EtcdStore(endpoints=[sys.argv[1]], prefix=sys.argv[2], ttl=2)
store.set("k", b"v"); store.add("n", 3)
print("there", flush=True)
threading.Event().wait()
"""


@pytest.mark.long
def test_keys_of_a_dead_job_vanish_and_those_of_a_live_one_stay(single: EtcdCluster) -> None:
    live = EtcdStore(endpoints=single.endpoints, prefix="leased/live", ttl=2)
    live.set("k", b"v")  # and nothing more: an idle connection is alive, too
    dead = subprocess.Popen(
        [sys.executable, "-c", JOB, single.endpoints[0], "leased/dead"], stdout=subprocess.PIPE
    )
    try:
        assert dead.stdout is not None and dead.stdout.readline() == b"there\n"
    finally:
        dead.send_signal(signal.SIGKILL)
        dead.wait()
        dead.stdout.close()
    killed = time.monotonic()
    assert len(single.keys("leased/dead/")) == 5  # k, n's two digits, the writer, the lease
    while single.keys("leased/dead/"):
        assert time.monotonic() - killed < 60 * pace()
        assert not threading.Event().wait(0.1)
    assert not threading.Event().wait(max(0.0, killed + 5 - time.monotonic()))  # 2.5 ttl
    assert live.get("k", 1.0) == b"v"
    live.close()


def test_connections_of_a_job_share_one_lease(single: EtcdCluster) -> None:
    one = EtcdStore(endpoints=single.endpoints, prefix="leased/shared", ttl=60)
    two = EtcdStore(endpoints=single.endpoints, prefix="leased/shared", ttl=60)
    clone = one.clone()
    in_threads(*[lambda s=s: s.add("n", 1) for s in (one, two, clone)])
    assert one._lease.number() == two._lease.number() == clone._lease.number()
    threads = [thread.name for thread in threading.enumerate()]
    assert threads.count("etcd-lease") == 2  # a clone has none of its own
    one.close()
    assert clone.add("n", 1) == 4
    clone.close()
    two.close()
    assert "etcd-lease" not in [thread.name for thread in threading.enumerate()]


def test_a_lease_that_has_expired_is_replaced(single: EtcdCluster) -> None:
    store = EtcdStore(endpoints=single.endpoints, prefix="leased/expired", ttl=60)
    store.add("n", 5)
    old = store._lease.number()
    single.request(single.members[0], "v3/lease/revoke", {"ID": old})
    assert store.add("n", 1) == 1  # its keys went with it
    assert store._lease.number() != old
    store.close()


# -- settings --------------------------------------------------------------------------------------


def test_a_missing_library_is_told_with_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "etcd3gw", None)
    with pytest.raises(ConfigError, match=r"pip install 'rallypoint\[etcd\]'"):
        EtcdStore(endpoints=["127.0.0.1:2379"], prefix="x")


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({"endpoints": []}, "endpoints"),
        ({"endpoints": ["host"]}, "'host': expected host:port"),
        ({"endpoints": ["ftp://host:1"]}, "expected host:port"),
        ({"endpoints": ["host:99999"]}, "expected host:port"),
        ({"prefix": "/"}, "prefix"),
        ({"ttl": 0}, "ttl 0"),
        ({"patience": 0}, "patience"),
        ({"user": "me"}, "a user and its password go together"),
        ({"ca_cert": "/none/ca.pem"}, "ca_cert '/none/ca.pem': no such file"),
        ({"cert": "/none/me.pem"}, "cert '/none/me.pem': no such file"),
        ({"key": __file__}, "expected a certificate (cert) beside the key"),
        ({"ca_cert": __file__}, "contains no PEM certificates"),
        ({"cert": __file__}, "contains no PEM certificate"),
    ],
)
def test_settings_that_cannot_work_are_named(settings: dict, expected: str) -> None:
    with pytest.raises(ConfigError) as caught:
        EtcdStore(**{"endpoints": ["127.0.0.1:2379"], "prefix": "x", **settings})
    assert expected in str(caught.value)


def test_a_closed_connection_says_so(store: EtcdStore) -> None:
    other = store.clone()
    other.close()
    with pytest.raises(RendezvousConnectionError, match="closed"):
        other.set("k", b"v")
    store.set("k", b"v")


@pytest.mark.parametrize("tls", [False, True], ids=["plain", "tls"])
def test_who_waits_for_a_key_is_woken_by_the_end_of_its_connection(
    tls: bool, request: pytest.FixtureRequest
) -> None:
    """A job's end closes what its threads wait on: they must not hold it up."""
    cluster: EtcdCluster = request.getfixturevalue("secured" if tls else "single")
    files = {}
    if tls:
        certificates: Certificates = request.getfixturevalue("certificates")
        names = {"ca_cert": "ca.pem", "cert": "client.pem", "key": "client.key"}
        files = {field: certificates.path(name) for field, name in names.items()}
    store = EtcdStore(endpoints=cluster.endpoints, prefix=f"jobs/wakes-{tls}", **files)
    with ThreadPoolExecutor(1) as pool:
        waits = pool.submit(store.get, "nothing", 60.0 * pace())
        while not store._client._watching:
            assert not waits.done()
        began = time.monotonic()
        store.close()
        with pytest.raises(RendezvousConnectionError, match="closed"):
            waits.result()
    assert time.monotonic() - began < 10 * pace()


def test_a_password_is_not_shown(single: EtcdCluster) -> None:
    store = EtcdStore(endpoints=single.endpoints, prefix="x", user="me", password="hush")
    assert "hush" not in repr(store._client.access)
    store.set("k", b"v")  # a cluster without users lets everybody in
    store.close()


def test_questions_between_nodes_leave_no_keys(store: EtcdStore) -> None:
    """Nor do the connections over which they are asked: each has a key of its own."""

    def connect() -> RecordStore:
        return RecordStore(store.clone(), Codec("job"))

    def keys() -> int:
        everything = {"key": encoded(store._root), "range_end": encoded(store._root + b"\xff")}
        found = store._client.call("/kv/range", {**everything, "count_only": True})
        return int(found.get("count", 0))

    asks = NodeQuestions(Round(0, 0, 2), connect)
    answers = NodeQuestions(Round(0, 1, 2), connect)
    reader = Journal(connect(), 0, 2)

    def answer_all(number: int) -> None:
        while number:
            entry = reader.next(30.0)
            if entry is not None and entry["what"] == "asked":
                answers.answer(entry["name"], {})
                asks.note_read(entry["name"])
                number -= 1

    thread = threading.Thread(target=answer_all, args=(32,))
    thread.start()
    # A question stays until the next one, and then leaves a note of its place.
    for _ in range(2):
        assert asks.ask({}, 30.0) == {1: {}}
    before = keys()
    for _ in range(30):
        assert asks.ask({}, 30.0) == {1: {}}
    thread.join(60)
    assert keys() <= before
    for each in (asks, answers):
        each.close()
