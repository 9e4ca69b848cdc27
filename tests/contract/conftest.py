"""Stores that need a server."""

import itertools
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from plugins.redislike.redislike import RedisLikeStore
from rallypoint.rendezvous.backends.etcd_store import EtcdStore
from servers.etcd_server import EtcdCluster, require_etcd


_numbers = itertools.count()


@pytest.fixture(scope="session")
def etcd_cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EtcdCluster]:
    require_etcd()
    cluster = EtcdCluster(tmp_path_factory.mktemp("etcd"))
    yield cluster
    cluster.stop()


@pytest.fixture
def etcd_store(etcd_cluster: EtcdCluster) -> Iterator[EtcdStore]:
    """A store with keys of its own, apart from other tests'."""
    store = EtcdStore(endpoints=etcd_cluster.endpoints, prefix=f"test/{next(_numbers)}")
    yield store
    store.delete_prefix()
    store.close()


@pytest.fixture(scope="session")
def redislike_server() -> Iterator[int]:
    program = Path(__file__).parents[1] / "plugins" / "redislike" / "redislike_server.py"
    words = [sys.executable, str(program), ""]
    with subprocess.Popen(words, stdout=subprocess.PIPE, text=True) as server:
        assert server.stdout is not None
        yield int(server.stdout.readline())
        server.kill()


@pytest.fixture
def redislike_store(redislike_server: int) -> Iterator[RedisLikeStore]:
    """A third party's store, with keys of its own, apart from other tests'."""
    opened: list[RedisLikeStore] = []

    class Store(RedisLikeStore):
        def __init__(self, *settings: Any) -> None:
            super().__init__(*settings)
            opened.append(self)

    store = Store([("127.0.0.1", redislike_server)], f"test/{next(_numbers)}/", "", 10.0)
    yield store
    RedisLikeStore.clear(store.clone())
    for each in opened:
        each.close()
