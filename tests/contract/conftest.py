"""Stores that need a server."""

import itertools
from collections.abc import Iterator

import pytest

from rallypoint.rendezvous.backends.etcd import EtcdStore
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
    """Keys that no other test has."""
    store = EtcdStore(endpoints=etcd_cluster.endpoints, prefix=f"test/{next(_numbers)}")
    yield store
    store.delete_prefix()
    store.close()
