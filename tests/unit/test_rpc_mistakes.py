"""A user's mistakes are reported at once, by name, where they were made."""

from __future__ import annotations

import functools
import gc
import math
import threading
import time

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import FakeTensorMode

from rallypoint import rpc
from rallypoint.errors import ConfigError
from rallypoint.rpc.optim import DistributedOptimizer


def leave():
    rpc.shutdown()


def add_one(x):
    return x + 1


def ask_in_vain():
    """Make a call with the default timeout, inside a call that has no time left."""
    rpc.current_call().deadline = time.monotonic() + 0.05
    try:
        rpc.rpc_sync("me", time.sleep, (0.3,))
    except rpc.RpcTimeout as error:
        return error.seconds
    return None


def count():
    yield 1


async def count_later():
    yield 1


def lock():
    return threading.Lock()


@pytest.fixture
def alone():
    rpc.init_rpc("me", rank=0, world_size=1, store=dist.HashStore())
    yield
    rpc.shutdown()


@pytest.fixture
def alone_so_far():
    """In a dynamic group."""
    rpc.init_rpc("me", store=dist.HashStore())
    yield
    rpc.shutdown()


@pytest.mark.parametrize(
    ("rank", "world_size", "told"),
    [
        (-1, 2, "rank -1: expected 0 to 1"),
        (2, 2, "rank 2: expected 0 to 1"),
        (0, 0, "world_size 0: expected at least 1"),
    ],
)
def test_a_rank_outside_the_group_is_refused_before_anybody_is_waited_for(rank, world_size, told):
    with pytest.raises(ConfigError, match=told):
        rpc.init_rpc("me", rank=rank, world_size=world_size, store=dist.HashStore())


def test_a_rank_that_no_group_can_have_is_refused():
    with pytest.raises(ConfigError, match="rank 2147483648: expected 0 to 2147483647, or none"):
        rpc.init_rpc("me", rank=2**31, store=dist.HashStore())


@pytest.mark.parametrize(
    "given", [{"rank": "0"}, {"world_size": "2"}, {"rank": None}, {"rank": 0.0}]
)
def test_a_rank_or_size_that_is_no_whole_number_is_named_with_what_to_write(given):
    (name, value), *_ = given.items()
    with pytest.raises(TypeError) as caught:
        rpc.init_rpc("me", **{"rank": 0, "world_size": 2, **given}, store=dist.HashStore())
    assert str(caught.value) == (
        f"{name} is {value!r}: expected an integer, as in {name}=int(os.environ['{name.upper()}'])"
    )


def test_a_rank_may_be_a_number_of_torch():
    rpc.init_rpc("me", rank=torch.tensor(0), world_size=torch.tensor(1), store=dist.HashStore())
    assert rpc.rpc_sync("me", add_one, (1,)) == 2
    rpc.shutdown()


@pytest.mark.parametrize("forever", [math.inf, 1e308, 1e12, 0])
def test_a_limit_too_large_to_count_is_none(forever, monkeypatch):
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("MASTER_PORT", "0")
    options = rpc.NativeRpcBackendOptions(rpc_timeout=forever)
    rpc.init_rpc("me", rank=0, world_size=1, rpc_backend_options=options)
    assert rpc.rpc_sync("me", add_one, (1,)) == 2
    assert rpc.rpc_sync("me", add_one, (1,), timeout=forever) == 2
    assert list(rpc.rpc_stream("me", iter, ([1, 2],), timeout=forever)) == [1, 2]
    value = rpc.remote("me", add_one, (1,), timeout=forever)
    assert (value.to_here(timeout=forever), value.rpc_sync(timeout=forever).bit_length()) == (2, 2)
    rpc.shutdown(timeout=forever)


def test_a_limit_of_many_days_is_no_more_than_a_store_can_wait(monkeypatch):
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("MASTER_PORT", "0")
    options = rpc.NativeRpcBackendOptions(rpc_timeout=86_400 * 365)
    rpc.init_rpc("me", rank=0, world_size=1, rpc_backend_options=options)
    assert rpc.rpc_sync("me", add_one, (1,)) == 2
    rpc.shutdown(timeout=-1)


@pytest.mark.parametrize("way", ["sync", "async", "stream", "remote", "to_here", "shutdown"])
def test_a_limit_that_is_no_number_is_named(alone, way):
    ways = {
        "sync": lambda: rpc.rpc_sync("me", add_one, (1,), timeout=math.nan),
        "async": lambda: rpc.rpc_async("me", add_one, (1,), timeout=math.nan),
        "stream": lambda: rpc.rpc_stream("me", iter, ([],), timeout=math.nan),
        "remote": lambda: rpc.remote("me", add_one, (1,), timeout=math.nan),
        "to_here": lambda: rpc.RRef(1).to_here(timeout=math.nan),
        "shutdown": lambda: rpc.shutdown(timeout=math.nan),
    }
    with pytest.raises(
        ValueError, match=r"^timeout is nan: expected seconds, 0 \(no limit\) or more$"
    ):
        ways[way]()
    assert rpc.rpc_sync("me", add_one, (1,)) == 2


@pytest.mark.parametrize(
    ("window", "kind"), [(0, ValueError), (-1, ValueError), (1.5, TypeError), (None, TypeError)]
)
def test_a_window_that_lets_nothing_through_is_refused(alone, window, kind):
    with pytest.raises(kind, match=f"window is {window}: expected"):
        rpc.rpc_stream("me", iter, ([1],), window=window)


def test_who_is_missing_is_told_and_a_second_attempt_meets_the_others(monkeypatch):
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("MASTER_PORT", "0")
    short = rpc.NativeRpcBackendOptions(rpc_timeout=0.2)
    with pytest.raises(TimeoutError, match=r"missing: rank 1, 2"):
        rpc.init_rpc("me", rank=0, world_size=3, rpc_backend_options=short)
    # The others have not failed: they still look where the first attempt was.
    store = dist.HashStore()
    options = rpc.NativeRpcBackendOptions(rpc_timeout=0.2)
    for _ in range(2):
        with pytest.raises(TimeoutError):
            rpc.init_rpc("me", rank=0, world_size=2, rpc_backend_options=options, store=store)
    prefixes = {prefix for prefix in range(50) if store.check([f"rpc_prefix_{prefix}/job"])}
    assert len(prefixes) == 1


@pytest.mark.parametrize(
    ("option", "kind", "told"),
    [
        ({"allowed_modules": "myapp"}, ConfigError, r"\('myapp',\)"),
        ({"allowed_modules": [math]}, ConfigError, "expected its name: 'math'"),
        ({"allowed_calls": math}, ConfigError, r"expected names in a tuple: \('math',\)"),
        ({"allowed_calls": [leave]}, ConfigError, rf"expected its name: '{__name__}\.leave'"),
        ({"allowed_calls": leave}, ConfigError, rf"in a tuple: \('{__name__}\.leave',\)"),
        ({"transports": "tcp"}, ConfigError, r"\('tcp',\)"),
        ({"transports": None}, ConfigError, "expected names in a tuple"),
        ({"transports": [5]}, ConfigError, "transports 5: expected some of memory, uds, tcp"),
        ({"port": "29500"}, ConfigError, "port '29500': expected a port"),
        ({"secret": "short"}, ConfigError, "has 5 bytes, at least 16"),
        ({"heartbeat": 0}, ConfigError, "heartbeat 0: expected seconds, more than 0"),
        ({"num_worker_threads": "4"}, TypeError, "num_worker_threads is '4'"),
        ({"init_method": None}, TypeError, "init_method is None: expected a string"),
        ({"bind": 5000}, TypeError, "bind is 5000: expected an address as a string"),
        ({"advertise": 5000}, TypeError, "advertise is 5000: expected an address as a string"),
        ({"devices": 0}, TypeError, r"devices is 0: expected a list, as in \[0\]"),
        ({"devices": "cuda:0"}, TypeError, r"devices is 'cuda:0': expected a list"),
        ({"device_maps": 0}, TypeError, "device_maps is 0: expected a dict of device maps"),
        ({"device_maps": {"w1": 0}}, TypeError, "the device map for w1 is 0: expected a dict"),
        ({"in_flight_bytes": "1GB"}, TypeError, "in_flight_bytes is '1GB': expected a number of"),
        ({"in_flight_bytes": -1}, ConfigError, "in_flight_bytes -1: expected a number of bytes"),
        ({"shared_memory_bytes": None}, TypeError, "shared_memory_bytes is None"),
        ({"shared_memory_bytes": -1}, ConfigError, "shared_memory_bytes -1: expected a number"),
    ],
)
def test_an_option_of_the_wrong_kind_is_named(option, kind, told):
    with pytest.raises(kind, match=told):
        rpc.NativeRpcBackendOptions(**option)


def test_a_short_secret_in_the_environment_is_refused_and_not_shown(monkeypatch):
    monkeypatch.setenv("RALLY_SECRET", "hunter2")
    with pytest.raises(ConfigError, match="RALLY_SECRET: the secret has 7 bytes") as caught:
        rpc.init_rpc("me", rank=0, world_size=1, store=dist.HashStore())
    assert "hunter2" not in str(caught.value)


def test_an_address_in_place_of_a_store_is_shown():
    with pytest.raises(TypeError, match=r"store is 'tcp://h:1': .* belongs in the init_method"):
        rpc.init_rpc("me", rank=0, world_size=1, store="tcp://h:1")


@pytest.mark.parametrize("args", [1, "ab", b"ab", {"x": 1}, {1}, np.ones(1), torch.ones(2)])
def test_an_argument_that_was_not_put_into_a_tuple_is_shown(alone, args):
    with pytest.raises(TypeError, match=r"args is .*expected positional arguments in a tuple"):
        rpc.rpc_sync("me", add_one, args)


@pytest.mark.parametrize("make", [lambda p: [p], lambda _: torch.nn.ReLU(), rpc.RRef])
def test_parameters_in_place_of_references_to_them_are_refused(alone, make):
    with pytest.raises(TypeError, match=r"params_rref (is|contains) a .*: expected a list of ref"):
        DistributedOptimizer(torch.optim.SGD, make(torch.nn.Parameter(torch.ones(2))), lr=0.1)


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ((0, torch.nn.ReLU), "remote_device is 0: expected a string, as 'rank:1/cpu'"),
        (("me", torch.nn.ReLU()), "module_cls is a module, a ReLU: expected its class"),
        (("me", torch.nn.ReLU, True), "args is True: expected positional arguments in a tuple"),
    ],
)
def test_an_argument_of_a_remote_module_of_the_wrong_kind_is_named(alone, given, told):
    with pytest.raises(TypeError, match=told):
        rpc.RemoteModule(*given)


def test_options_and_backends_of_torch_itself_are_told_from_those_of_this_package():
    import torch.distributed.rpc as torch_rpc

    torchs = torch_rpc.TensorPipeRpcBackendOptions(), torch_rpc.BackendType.TENSORPIPE
    for name, given in zip(("rpc_backend_options", "backend"), torchs, strict=True):
        told = f"torch's own; take {type(given).__name__} from rallypoint.rpc, or call .*install"
        with pytest.raises(TypeError, match=told):
            rpc.init_rpc("me", rank=0, world_size=1, store=dist.HashStore(), **{name: given})


@pytest.mark.parametrize(
    ("wait", "told"),
    [
        (lambda: rpc.wait_for(5), "names is 5: expected the name of a worker"),
        (lambda: rpc.wait_for(["me", 5]), "names contains 5: expected the name of a worker"),
        (lambda: rpc.wait_for("me", timeout="1"), "timeout is '1': expected seconds as a number"),
    ],
)
def test_what_cannot_be_waited_for_is_named(alone_so_far, wait, told):
    with pytest.raises(TypeError, match=told):
        wait()


@pytest.mark.parametrize("listen", [rpc.on_join, rpc.on_leave])
def test_a_callback_that_cannot_be_called_is_refused_at_once(alone_so_far, listen):
    with pytest.raises(TypeError, match="callback is None: expected a function"):
        listen(None)


def test_a_timeout_that_is_no_number_is_shown(alone):
    with pytest.raises(TypeError, match="timeout is None: expected seconds"):
        rpc.rpc_sync("me", add_one, (1,), timeout=None)
    with pytest.raises(TypeError, match="timeout is '5': expected seconds"):
        rpc.shutdown(timeout="5")


@pytest.mark.parametrize("given", [-1, math.nan])
def test_a_default_timeout_with_which_every_call_would_fail_is_refused(alone, given):
    with pytest.raises(ValueError, match=f"timeout is {given}: expected seconds"):
        rpc.api._set_rpc_timeout(given)
    assert rpc.rpc_sync("me", add_one, (1,)) == 2


def test_the_result_of_a_call_in_place_of_a_function_is_shown(alone):
    with pytest.raises(TypeError, match="It is 2"):
        rpc.rpc_sync("me", add_one(1))


def test_a_lambda_says_how_it_could_travel(alone):
    with pytest.raises(AttributeError, match="sent by name; define it .* pickle_by_value=True"):
        rpc.rpc_sync("me", lambda: 1)
    with pytest.raises(TypeError, match=r"cannot pickle 'generator' object: .*rpc.remote"):
        rpc.rpc_sync("me", print, ((x for x in ()),))


def test_a_fake_tensor_is_refused_by_its_name(alone):
    with FakeTensorMode(), pytest.raises(ValueError, match=r"a fake tensor .* cannot be sent"):
        rpc.rpc_sync("me", print, ([torch.empty(3)],))


def test_a_result_that_cannot_be_pickled_is_told_from_an_argument(alone):
    with pytest.raises(TypeError) as caught:
        rpc.rpc_sync("me", lock)
    assert "its result could not be sent" in "".join(caught.value.__notes__)


@pytest.mark.parametrize("func", [count, count_later])
def test_a_call_of_a_generator_function_says_what_gives_its_items(alone, func):
    with pytest.raises(TypeError) as caught:
        rpc.rpc_sync("me", func)
    assert "rpc.rpc_stream() gives its items" in "".join(caught.value.__notes__)
    assert list(rpc.rpc_stream("me", func)) == [1]


def test_a_served_function_that_shuts_down_is_told_so_and_does_not_wait_for_itself(alone):
    with pytest.raises(rpc.RpcError, match="would wait for that call to end"):
        rpc.rpc_sync("me", leave, timeout=5)


def test_a_call_that_inherits_its_time_names_the_time_it_had(alone):
    assert rpc.rpc_sync("me", ask_in_vain) <= 0.05


@pytest.mark.parametrize("world_size", [2, None])
def test_without_a_launcher_what_is_missing_is_told_and_nothing_beside_it(monkeypatch, world_size):
    for name in ("MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    with pytest.raises(ConfigError, match=r"needs MASTER_ADDR and MASTER_PORT.*rally run") as told:
        rpc.init_rpc("me", rank=0, world_size=world_size)
    assert told.value.__context__ is None


def nap(seconds):
    time.sleep(seconds)
    return seconds


async def work(x):
    return x


class Wrapped:
    """A callable that cannot be recognized as a coroutine function."""

    def __call__(self, x):
        return work(x)


@pytest.mark.parametrize("func", [work, functools.partial(work, 1)])
def test_a_stream_of_a_coroutine_function_is_refused_by_name(alone, func):
    with pytest.raises(TypeError, match="a coroutine function, which has one result: expected a"):
        rpc.rpc_stream("me", func, (1,))


@pytest.mark.filterwarnings("error")
def test_a_coroutine_that_only_the_callee_finds_is_refused_too(alone, recwarn):
    with pytest.raises(TypeError, match="Wrapped object .* a coroutine function"):
        list(rpc.rpc_stream("me", Wrapped(), (1,)))
    gc.collect()
    assert not recwarn.list


@pytest.mark.parametrize(
    ("method", "given"), [("set_result", 7), ("set_exception", ValueError("mine"))]
)
def test_a_result_of_ones_own_for_the_future_of_a_call_is_refused(alone, caplog, method, given):
    future = rpc.rpc_async("me", nap, (0.2,))
    for _ in range(2):
        with pytest.raises(rpc.RpcError) as caught:
            getattr(future, method)(given)
        assert str(caught.value) == (
            f"Future can only be marked completed once: {method}() was called on the future of a call ({__name__}.nap on 'me'), which the call's answer completes:"
            " use cancel() to wait no longer, or a torch.futures.Future() of your own for another result"
        )
        # The answer arrives as usual, and is not replaced later either.
        assert future.wait() == 0.2
    assert not caplog.records
