"""In torch's place and back out of it; and torch's own agent through our registry."""

import functools
import importlib
import sys
import time
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed.autograd as torch_autograd

import rpc_workers
from rallypoint import compat, rpc
from rpc_workers import Workers, eventually


pytestmark = pytest.mark.integration


# Its names are torch's own, which have no types.
autograd: Any = torch_autograd


def double(x: Any) -> Any:
    return 2 * x


def fail() -> None:
    raise ValueError("bad")


def nap(seconds: float) -> float:
    time.sleep(seconds)
    return seconds


class Counter:
    def __init__(self, start: int = 0) -> None:
        self.count = start

    def add(self, x: int) -> int:
        self.count += x
        return self.count


OPTIMIZER = "torch.distributed.optim.optimizer"


def torch_rpc() -> Any:
    """As a program imports it, now."""
    return importlib.import_module("torch.distributed.rpc")


def everything() -> dict[str, Any]:
    """Everything that an installation may change."""
    native = torch._C._distributed_rpc
    return {
        "modules": {
            name: id(module)
            for name, module in sys.modules.items()
            if name.startswith("torch.distributed.rpc")
        },
        "attribute": id(torch.distributed.rpc),
        "names": {name: id(value) for name, value in vars(torch_rpc()).items()},
        "native": {name: id(getattr(native, name)) for name in dir(native)},
        "api": {name: id(value) for name, value in vars(torch_rpc().api).items()},
        "autograd": {name: id(value) for name, value in vars(autograd).items()},
        "native autograd": {
            name: id(getattr(torch._C._distributed_autograd, name))
            for name in dir(torch._C._distributed_autograd)
        },
        "context": {name: id(value) for name, value in vars(autograd.context).items()},
        "optimizer": id(
            getattr(sys.modules.get(OPTIMIZER), "DistributedOptimizer", object).__init__
        ),
        "ddp": id(torch.nn.parallel.distributed.RRef),
        "finders": [id(each) for each in sys.meta_path],
    }


# -- in and out ---------------------------------------------------------------------------------


def test_what_is_installed_can_be_taken_out_without_a_trace():
    with Workers(1) as workers:

        def case():
            torch_rpc()
            before = everything()
            theirs = torch_rpc().rpc_sync
            for _ in range(3):
                compat.install()
                compat.install()
                assert compat.is_installed()
                assert torch_rpc().rpc_sync is rpc.rpc_sync
                assert torch.distributed.rpc.rpc_sync is rpc.rpc_sync
                compat.uninstall()
                compat.uninstall()
                assert not compat.is_installed()
                assert torch_rpc().rpc_sync is theirs
                assert everything() == before
            with compat.installed():
                assert torch_rpc().rpc_sync is rpc.rpc_sync
            with pytest.raises(ZeroDivisionError), compat.installed():
                _ = 1 / 0
            assert everything() == before

        workers.on(0, case)


def test_every_form_of_import_finds_ours_while_it_is_installed():
    with Workers(1) as workers:

        def case():
            with compat.installed():
                found: dict[str, Any] = {}
                exec(
                    "import torch.distributed.rpc\n"
                    "import torch.distributed.rpc as a\n"
                    "from torch.distributed import rpc as b\n"
                    "from torch.distributed.rpc import rpc_sync, RRef, WorkerInfo, is_available\n"
                    "from torch.distributed.rpc.functions import async_execution\n"
                    "from torch.distributed.rpc.api import _wait_all, get_worker_info\n"
                    "from torch.distributed.rpc import backend_registry, constants, options\n"
                    "import torch.distributed.rpc.internal as internal\n",
                    found,
                )
                assert found["a"] is found["b"] is torch.distributed.rpc
                assert found["rpc_sync"] is rpc.rpc_sync
                assert found["RRef"] is rpc.RRef
                assert found["async_execution"] is rpc.async_execution
                assert found["is_available"]()
                assert found["constants"].DEFAULT_RPC_TIMEOUT_SEC == 60

        workers.on(0, case)


weight = torch.nn.Parameter(torch.tensor([2.0]))


def weighted(x: torch.Tensor) -> torch.Tensor:
    return x * weight


def reference_to_weight() -> rpc.RRef[Any]:
    return rpc.RRef(weight)


def weight_now() -> float:
    return weight.item()


@pytest.mark.parametrize("imported", ["before", "after"])
def test_distributed_autograd_is_ours_and_torchs_again_afterwards(imported):
    with Workers(2) as workers:

        def begin():
            if imported == "before":
                importlib.import_module(OPTIMIZER)
            rpc_workers.held["before"] = everything()
            compat.install()
            rpc_workers.join()

        def train():
            optimizer = importlib.import_module("torch.distributed.optim").DistributedOptimizer(
                torch.optim.SGD, [rpc.rpc_sync("w1", reference_to_weight)], lr=0.5
            )
            x = torch.ones(1, requires_grad=True)
            with autograd.context() as context:
                autograd.backward(context, [rpc.rpc_sync("w1", weighted, (3 * x,)).sum()])
                assert autograd.get_gradients(context) == {x: 6}
                assert torch._C._distributed_autograd.get_gradients(context) == {x: 6}
                optimizer.step(context)
                with pytest.raises(RuntimeError, match="Already have an autograd context id"):
                    autograd.context().__enter__()
                seen = autograd._retrieve_context(context)
                assert seen._context_id() == context == autograd._current_context()._context_id()
                assert seen._known_worker_ids() == {1}
                (sent,), (received,) = (
                    seen._send_functions().values(),
                    seen._recv_functions().values(),
                )
                assert sent.name() == "torch::distributed::autograd::SendRpcBackward"
                assert received.name() == "torch::distributed::autograd::RecvRpcBackward"
                assert sent.next_functions[0][0].name() == "MulBackward0"
            assert rpc.rpc_sync("w1", weight_now) == 0.5
            with pytest.raises(RuntimeError, match="Could not find autograd context"):
                autograd.get_gradients(context)

        def end():
            rpc.shutdown()
            compat.uninstall()
            if imported == "before":
                assert everything() == rpc_workers.held["before"]
            optimizer = importlib.import_module(OPTIMIZER).DistributedOptimizer
            assert optimizer.__init__.__module__ == optimizer.step.__module__ == OPTIMIZER
            autograd._init(rpc_workers.rank)
            with autograd.context() as context:
                x = torch.ones(1, requires_grad=True)
                autograd.backward(context, [(2 * x).sum()])
                assert autograd.get_gradients(context)[x] == 2

        workers.run(begin)
        workers.on(0, train)
        workers.run(end)


def test_contexts_of_torchs_autograd_do_not_begin_over_ours_without_compat_either():
    with Workers(1) as workers:

        def case():
            rpc_workers.join()
            with pytest.raises(RuntimeError, match="initialize distributed autograd"):
                autograd.context().__enter__()
            rpc.shutdown()

        workers.on(0, case)


def forward(module: Any, x: torch.Tensor) -> torch.Tensor:
    return module.forward(x).detach()


def test_torchs_remote_module_runs_over_ours():
    with Workers(2) as workers:

        def case():
            with compat.installed():
                nn = importlib.import_module("torch.distributed.nn")
                rpc_workers.join()
                if rpc.get_worker_info().id == 0:
                    module = nn.RemoteModule("w1/cpu", torch.nn.Linear, args=(2, 3))
                    weight, bias = (each.to_here() for each in module.remote_parameters())
                    x = torch.rand(4, 2)
                    wanted = torch.nn.functional.linear(x, weight, bias).detach()
                    assert torch.equal(module.forward(x).detach(), wanted)
                    assert torch.equal(module.forward_async(x).wait().detach(), wanted)
                    # And when the module itself is sent.
                    assert torch.equal(rpc.rpc_sync("w1", forward, (module, x)), wanted)
                    del module, weight, bias
                rpc.shutdown()

        workers.run(case)


def test_torchs_remote_module_runs_where_only_what_is_exported_is_called():
    with Workers(2) as workers:
        torchs = ("torch.distributed.nn.api.remote_module", "_remote_module_non_scriptable")

        def case():
            with compat.installed():
                nn = importlib.import_module("torch.distributed.nn")
                rpc.export(torch.nn.Linear)
                rpc_workers.join(exported_only=True, allowed_calls=torchs)
                if rpc.get_worker_info().id == 0:
                    module = nn.RemoteModule("w1/cpu", torch.nn.Linear, args=(2, 3))
                    assert module.forward(torch.rand(4, 2)).shape == (4, 3)
                    del module
                rpc.shutdown()

        workers.run(case)


def test_a_member_of_a_group_does_not_change_horses():
    with Workers(1) as workers:

        def case():
            rpc_workers.join()
            with pytest.raises(rpc.RpcError, match="cannot install while this process is a member"):
                compat.install()
            rpc.shutdown()
            compat.install()
            rpc_workers.join()
            with pytest.raises(rpc.RpcError, match="cannot uninstall while this process is a m"):
                compat.uninstall()
            rpc.shutdown()
            compat.uninstall()

        workers.on(0, case)


def program(address: str) -> Any:
    """As somebody wrote it for torch, unmodified."""
    import torch.distributed.rpc as rpc  # as such programs do

    rank, size = rpc_workers.rank, rpc_workers.world_size
    options = rpc.TensorPipeRpcBackendOptions(
        num_worker_threads=8, rpc_timeout=20, init_method=address
    )
    rpc.init_rpc(
        f"worker{rank}",
        backend=rpc.BackendType.TENSORPIPE,
        rank=rank,
        world_size=size,
        rpc_backend_options=options,
    )
    found = None
    if rank == 0:
        rref = rpc.remote("worker1", Counter, args=(5,))
        futures = [rpc.rpc_async(f"worker{1 + i % 2}", double, args=(i,)) for i in range(10)]
        try:
            rpc.rpc_sync("worker2", fail)
        except ValueError as error:
            told = str(error)
        with pytest.raises(RuntimeError, match="RPC ran for more than"):
            rpc.rpc_sync("worker1", nap, args=(1,), timeout=0.1)
        found = (
            rref.rpc_sync().add(3),
            rref.to_here().count,
            torch.futures.wait_all(futures),
            "bad" in told,
            rpc.rpc_sync("worker2", torch.add, args=(torch.ones(2), 1)).tolist(),
            rpc.get_worker_info("worker2").id,
            type(rpc.api._get_current_rpc_agent()).__name__,
        )
        del rref
    rpc.shutdown()
    return found


@pytest.mark.parametrize("ours", [True, False], ids=["ours", "torchs"])
def test_a_program_for_torch_does_the_same_on_either(ours, tmp_path):
    with Workers(3) as workers:
        if ours:
            workers.run(compat.install)
        found, *_ = workers.run(program, f"file://{tmp_path}/store", limit=40)
    assert found[:-1] == (8, 8, list(range(0, 20, 2)), True, [2, 2], 2)
    assert found[-1] == ("Agent" if ours else "TensorPipeAgent")


# -- torch's own agent --------------------------------------------------------------------------


def join_tensorpipe() -> None:
    rpc.init_rpc(
        f"w{rpc_workers.rank}",
        backend=rpc.BackendType.TENSORPIPE,
        rank=rpc_workers.rank,
        world_size=rpc_workers.world_size,
        rpc_backend_options=rpc.TensorPipeRpcBackendOptions(rpc_timeout=20),
        store=rpc_workers.store(),
    )


@pytest.fixture
def tensorpipe() -> Iterator[Workers]:
    with Workers(2) as workers:
        workers.run(join_tensorpipe)
        yield workers


def test_torchs_agent_runs_behind_our_functions(tensorpipe):
    def case():
        assert rpc.rpc_sync("w1", double, (2,)) == 4
        assert rpc.rpc_async(1, double, (3,)).wait() == 6
        rref = rpc.remote("w1", Counter, (5,))
        assert rref.rpc_sync().add(1) == 6
        assert rref.to_here().count == 6
        assert rpc.get_worker_info("w1").id == 1
        assert rpc.get_worker_info().name == "w0"
        assert rpc.get_rpc_timeout() == 20
        with pytest.raises(ValueError, match="bad"):
            rpc.rpc_sync("w1", fail)
        with pytest.raises(RuntimeError, match="RPC ran for more than"):
            rpc.rpc_sync("w1", nap, (1,), timeout=0.1)
        assert "agent.thread_pool_size" in rpc.api._get_debug_info()
        del rref

    tensorpipe.on(0, case)
    tensorpipe.run(rpc.shutdown)

    def is_out():
        with pytest.raises(rpc.RpcError):
            rpc.get_worker_info()

    tensorpipe.run(is_out)


def test_what_torchs_agent_cannot_do_is_said(tensorpipe):
    def case():
        ways = {
            "streams": lambda: rpc.rpc_stream("w1", range, (3,)),
            "statistics": rpc.statistics,
            "members": rpc.members,
            "wait_for": lambda: rpc.wait_for("w1"),
            "on_join": lambda: rpc.on_join(print),
        }
        told = {}
        for name, way in ways.items():
            try:
                way()
                told[name] = ""
            except rpc.RpcError as error:
                told[name] = str(error)
            except Exception as error:
                told[name] = f"!! {type(error).__name__}: {error}"
        assert not [each for each in told.values() if each.startswith("!!")], told
        assert "TensorPipe has no streams" in told["streams"]

    tensorpipe.on(0, case)
    tensorpipe.run(rpc.shutdown)


def test_torchs_agent_and_ours_take_turns_in_one_process():
    with Workers(2) as workers:
        for join in (join_tensorpipe, rpc_workers.join, join_tensorpipe, rpc_workers.join):
            workers.run(join)
            assert workers.on(0, lambda: rpc.rpc_sync("w1", double, (2,))) == 4
            workers.run(functools.partial(rpc.shutdown))
        workers.run(lambda: eventually(lambda: not rpc.api._is_current_rpc_agent_set()))
