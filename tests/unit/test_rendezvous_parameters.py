"""Parameters are checked when given, options when read; the error says which one and what is allowed."""

import pickle
import socket
from typing import Any

import pytest

from rallypoint import rendezvous
from rallypoint.errors import ConfigError, RendezvousError, RendezvousTimeout
from rallypoint.rendezvous import (
    RendezvousInfo,
    RendezvousParameters,
    RendezvousStoreInfo,
)
from rallypoint.rendezvous.backends.memory import MemoryStore


def parameters(**more: Any) -> RendezvousParameters:
    given = {
        "backend": "tcpstore",
        "endpoint": "node0:29400",
        "run_id": "job",
        "min_nodes": 1,
        "max_nodes": 2,
    }
    return RendezvousParameters(**{**given, **more})


def test_what_is_given_is_kept_under_torchs_names() -> None:
    made = RendezvousParameters("etcd", "a:2379", "job", 2, 4, "10.0.0.1", timeout="5")
    assert (made.backend, made.endpoint, made.run_id) == ("etcd", "a:2379", "job")
    assert (made.min_nodes, made.max_nodes, made.local_addr) == (2, 4, "10.0.0.1")
    assert made.config == {"timeout": "5"}
    assert made.get("timeout") == "5"
    assert made.get("other") is None
    assert made.get("other", 7) == 7


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("backend", ""),
        ("backend", 5),
        ("run_id", ""),
        ("run_id", None),
        ("endpoint", None),
        ("local_addr", 12),
        ("min_nodes", 0),
        ("min_nodes", -1),
        ("min_nodes", "1"),
        ("min_nodes", 1.0),
        ("min_nodes", True),
        ("max_nodes", True),
        ("max_nodes", None),
        ("max_nodes", 2.5),
    ],
)
def test_an_impossible_value_is_named(field: str, value: object) -> None:
    with pytest.raises(ConfigError) as caught:
        parameters(**{field: value})
    assert (caught.value.field, caught.value.value) == (field, value)


def test_the_most_nodes_are_not_below_the_fewest() -> None:
    with pytest.raises(ConfigError, match=r"max_nodes 3: .*min_nodes \(4\)"):
        parameters(min_nodes=4, max_nodes=3)


@pytest.mark.parametrize("value", ["1", "true", "True", "T", "YES", "y", True, 1])
def test_yes_in_every_spelling(value: object) -> None:
    assert parameters(flag=value).get_as_bool("flag") is True


@pytest.mark.parametrize("value", ["0", "false", "FALSE", "f", "No", "n", False, 0])
def test_no_in_every_spelling(value: object) -> None:
    assert parameters(flag=value).get_as_bool("flag", True) is False


@pytest.mark.parametrize("value", ["", "on", "2", "10", 2, -1, 1.0, b"1", []])
def test_neither_yes_nor_no(value: object) -> None:
    with pytest.raises(ConfigError) as caught:
        parameters(flag=value).get_as_bool("flag")
    assert "flag" in caught.value.field and caught.value.value == value
    assert "true or false" in str(caught.value)


@pytest.mark.parametrize(("value", "number"), [("12", 12), ("-3", -3), (" 7 ", 7), (0, 0)])
def test_whole_numbers(value: object, number: int) -> None:
    assert parameters(count=value).get_as_int("count") == number


@pytest.mark.parametrize("value", ["", "x", "2.5", 2.0, True, "9" * 5000, []])
def test_no_whole_number(value: object) -> None:
    with pytest.raises(ConfigError, match="whole number") as caught:
        parameters(count=value).get_as_int("count")
    assert "count" in caught.value.field and caught.value.value == value


@pytest.mark.parametrize(("value", "seconds"), [("30", 30.0), ("0.5", 0.5), (2, 2.0), ("1e3", 1e3)])
def test_seconds(value: object, seconds: float) -> None:
    read = parameters(timeout=value).get_as_seconds("timeout", 9.0)
    assert read == seconds and isinstance(read, float)


@pytest.mark.parametrize(
    "value", ["", "soon", "0", 0, -1, "-0.5", "inf", "nan", float("inf"), True, 10**400, []]
)
def test_no_length_of_time(value: object) -> None:
    with pytest.raises(ConfigError, match="seconds") as caught:
        parameters(timeout=value).get_as_seconds("timeout", 9.0)
    assert "timeout" in caught.value.field and caught.value.value == value


def test_defaults_stand_in_for_what_is_not_given() -> None:
    made = parameters(empty=None)
    assert made.get_as_bool("absent") is None
    assert made.get_as_bool("absent", True) is True
    assert made.get_as_int("absent") is None
    assert made.get_as_int("absent", 3) == 3
    assert made.get_as_seconds("absent", 3) == 3.0
    assert made.get_as_seconds("empty", 3) == 3.0
    assert made.get_as_bool("empty", True) is None  # as in torch: None was given
    assert made.get_as_int("empty", 3) is None


def test_a_creator_gets_on_with_torchs_parameters_as_well() -> None:
    torch_api = pytest.importorskip("torch.distributed.elastic.rendezvous.api")

    def read(params: Any) -> tuple[Any, ...]:
        return (
            (params.backend, params.endpoint, params.run_id, params.min_nodes, params.max_nodes),
            (params.local_addr, params.config, params.get("a"), params.get("none", 1)),
            (params.get_as_int("a"), params.get_as_bool("b"), params.get_as_bool("none", False)),
        )

    given = ("c10d", "node0:29400", "job", 1, 4, "10.0.0.1")
    options = {"a": "5", "b": "yes"}
    ours = RendezvousParameters(*given, **options)
    assert read(ours) == read(torch_api.RendezvousParameters(*given, **options))


def test_a_time_out_says_how_many_nodes_were_wanted() -> None:
    arrived = ("node 0 (a)", "node 1 (b)", "node 2 (c)")
    assert str(RendezvousTimeout(30, 4, arrived)).startswith("3 of 4 nodes arrived within 30 s")
    error = RendezvousTimeout(30, 4, arrived, at_most=8)
    assert str(error).startswith("3 of 4 to 8 nodes arrived within 30 s")
    assert str(RendezvousTimeout(30, 4, arrived, (3,), 4)).startswith("3 of 4 nodes arrived")
    again = pickle.loads(pickle.dumps(error))
    assert (str(again), again.wanted, again.at_most) == (str(error), 4, 8)


def test_the_errors_have_torchs_names_and_one_root() -> None:
    assert rendezvous.RendezvousTimeoutError is RendezvousTimeout
    for name in ("Closed", "Connection", "GracefulExit", "State", "Timeout"):
        error = getattr(rendezvous, f"Rendezvous{name}Error")
        assert issubclass(error, RendezvousError)
        assert f"Rendezvous{name}Error" in rendezvous.__all__


def test_a_rendezvous_that_fails_is_a_runtime_error_that_pickles() -> None:
    errors = [
        RendezvousTimeout(30, 4, ("node 0 (a)",), (1, 2, 3)),
        *(
            getattr(rendezvous, f"Rendezvous{name}Error")("said so")
            for name in ("Closed", "Connection", "GracefulExit", "State", "")
        ),
    ]
    for error in errors:
        assert isinstance(error, RuntimeError)
        again = pickle.loads(pickle.dumps(error))
        assert (type(again), str(again)) == (type(error), str(error))


def test_the_workers_store_is_settled_as_in_torch() -> None:
    torch_api = pytest.importorskip("torch.distributed.elastic.rendezvous.api")
    from torch.distributed import HashStore

    for ours, theirs in ((RendezvousStoreInfo, None), (torch_api.RendezvousStoreInfo, 1)):
        store = HashStore()
        first = ours.build(0, store, "10.0.0.7", 29511)
        assert (first.master_addr, first.master_port) == ("10.0.0.7", 29511)
        # The second node reads what the first has written, even if the first used the other package.
        other = torch_api.RendezvousStoreInfo if theirs is None else RendezvousStoreInfo
        second = other.build(1, store, "10.0.0.8")
        assert (second.master_addr, second.master_port) == ("10.0.0.7", 29511)
        assert store.get(ours.MASTER_PORT_KEY) == b"29511"
    free = RendezvousStoreInfo.build(0, HashStore(), None)
    assert free.master_addr == socket.getfqdn() and free.master_port > 0
    assert RendezvousStoreInfo("a", 1) == RendezvousStoreInfo(master_addr="a", master_port=1)


def test_no_handler_shares_its_store_with_workers_unless_it_says_so() -> None:
    handler = rendezvous.rendezvous_handler_registry.create_handler(parameters(backend="memory"))
    assert handler.use_agent_store is False
    handler.shutdown()


def test_a_round_unpacks_into_three_whether_or_not_it_knows_the_workers_store() -> None:
    store = MemoryStore()
    where = RendezvousStoreInfo("node0", 29500)
    plain = RendezvousInfo(store, 1, 2)
    assert plain.bootstrap_store_info is None
    info = RendezvousInfo(store, 1, 2, where)
    assert info.bootstrap_store_info == RendezvousStoreInfo(master_addr="node0", master_port=29500)
    assert list(plain) == list(info) == [store, 1, 2]
