"""Gradients through calls: equal to those of one process, kept per context, and gone when the context ends."""

import asyncio
import functools
import gc
import queue
import random
import threading
import warnings
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import rpc_workers
from rallypoint import rpc
from rallypoint.errors import PeerLost, RpcError, RpcTimeout
from rallypoint.rpc import autograd
from rallypoint.rpc.autograd import served
from rallypoint.rpc.current_agent import current_agent
from rallypoint.rpc.optim import DistributedOptimizer
from rpc_workers import Workers, eventually


pytestmark = pytest.mark.integration


@pytest.fixture(scope="module")
def four() -> Iterator[Workers]:
    """w0 to w3; in the end no worker keeps a context."""
    with Workers(4) as workers:
        workers.run(functools.partial(rpc_workers.join, num_worker_threads=4))
        yield workers
        workers.run(nothing_is_kept)
        workers.run(rpc_workers.leave)


def nothing_is_kept() -> None:
    eventually(lambda: current_agent().contexts.counts() == (0, 0))


def double(value: float, *size: int) -> Tensor:
    return torch.full(size, value, dtype=torch.float64, requires_grad=True)


# -- random programs, which run on workers and in one process ------------------------------------------


SIZE = 3
# The parameters of each worker, made when they are first used.
parameters: dict[tuple[int, int], Tensor] = {}
calls_made = 0


def parameter(seed: int, worker: int) -> Tensor:
    key = seed, worker
    if key not in parameters:
        source = torch.Generator().manual_seed(seed * 7 + worker)
        made = torch.rand(SIZE, dtype=torch.float64, generator=source)
        parameters[key] = made.requires_grad_()
    return parameters[key]


def a_program(chance: random.Random, depth: int, size: int, given: int) -> list[Any]:
    """Steps that each add a tensor to the existing ones."""
    steps: list[Any] = []
    there = given
    for _ in range(chance.randint(2, 5)):
        kind = chance.choice(["join", "own", "call", "call", "alone"])
        if kind == "call" and depth:
            sent = [chance.randrange(there) for _ in range(chance.randint(1, 3))] if there else []
            inner = a_program(chance, depth - 1, size, len(sent))
            how = chance.choice(["sync", "async", "remote", "remote method"])
            steps.append(("call", chance.randrange(size), how, sent, inner))
        elif kind == "join" and there:
            what = chance.choice(["mul", "add", "view", "detach", "inplace"])
            steps.append((what, chance.randrange(there), chance.randrange(there)))
        elif kind == "alone":
            steps.append(("plain",))
        else:
            steps.append(("own",))
        there += 1
    return steps


Call = Callable[[int, str, int, list[Any], list[Tensor]], Tensor]


def run_steps(worker: int, seed: int, steps: list[Any], given: list[Tensor], call: Call) -> Tensor:
    there = list(given)
    for step in steps:
        match step:
            case ("call", to, how, sent, inner):
                there.append(call(to, how, seed, inner, [there[each] for each in sent]))
            case ("mul", one, other):
                there.append(there[one] * torch.sin(there[other]))
            case ("add", one, other):
                there.append(there[one] + 0.5 * there[other])
            case ("view", one, other):
                both = torch.stack([there[one], there[other]], 1)
                there.append(both[:, 1])  # not contiguous
            case ("detach", one, _):
                there.append(there[one].detach())
            case ("inplace", one, other):
                made = there[one].clone()
                made.mul_(there[other])
                there.append(made)
            case ("own",):
                there.append(parameter(seed, worker) * 1.5)
            case ("plain",):
                there.append(torch.linspace(0, 1, SIZE, dtype=torch.float64))
    return there[-1] + there[0]


def call_here(to: int, how: str, seed: int, steps: list[Any], given: list[Tensor]) -> Tensor:
    del how
    return run_steps(to, seed, steps, given, call_here)


class Doer:
    def __init__(self, to: int) -> None:
        self.to = to

    def do(self, seed: int, steps: list[Any], given: list[Tensor]) -> Tensor:
        return run_steps(self.to, seed, steps, given, call_there)


def served_steps(to: int, seed: int, steps: list[Any], given: list[Tensor]) -> Tensor:
    return run_steps(to, seed, steps, given, call_there)


def call_there(to: int, how: str, seed: int, steps: list[Any], given: list[Tensor]) -> Tensor:
    name, args = f"w{to}", (to, seed, steps, given)
    result: Tensor
    if how == "sync":
        result = rpc.rpc_sync(name, served_steps, args)
    elif how == "async":
        result = rpc.rpc_async(name, served_steps, args).wait()
    elif how == "remote":
        result = rpc.remote(name, served_steps, args).to_here()
    else:
        result = rpc.remote(name, Doer, (to,)).rpc_sync().do(seed, steps, given)
    return result


def gradients_of(context_id: int, seed: int) -> dict[int, Tensor]:
    """The gradients of this worker's parameters of a program, by worker, where there are any."""
    try:
        found = autograd.get_gradients(context_id)
    except RpcError:
        return {}  # the context has not reached this worker
    return {
        worker: found[each]
        for (of, worker), each in parameters.items()
        if of == seed and each in found
    }


def compare(seed: int, size: int) -> bool:
    """Run a random program over workers and in this process. Returns whether it has gradients."""
    chance = random.Random(seed)
    steps = a_program(chance, 3, size, 1)
    with autograd.context() as context_id:
        start = double(0.7, SIZE)
        loss = run_steps(0, seed, steps, [start], call_there).sum()
        got: dict[int, Tensor] = {}
        if loss.requires_grad:
            times = chance.choice([1, 1, 2])
            for at in range(times):
                autograd.backward(context_id, [loss], retain_graph=at + 1 < times)
            for worker in range(size):
                got.update(rpc.rpc_sync(f"w{worker}", gradients_of, (context_id, seed)))
        own = autograd.get_gradients(context_id).get(start)
        assert start.grad is None
    before = dict(parameters)
    parameters.clear()
    try:
        again = double(0.7, SIZE)
        expected = run_steps(0, seed, steps, [again], call_here).sum()
        torch.testing.assert_close(loss, expected, rtol=0, atol=1e-10)
        wanted: dict[int, Tensor] = {}
        if expected.requires_grad:
            expected.backward()  # type: ignore[no-untyped-call]
            for (_, worker), each in parameters.items():
                if each.grad is not None:
                    wanted[worker] = each.grad * times
            if again.grad is not None:
                wanted[-1] = again.grad * times
    finally:
        parameters.clear()
        parameters.update(before)
    if own is not None:
        got[-1] = own
    assert got.keys() == wanted.keys(), (seed, sorted(got), sorted(wanted))
    for worker, each in wanted.items():
        torch.testing.assert_close(got[worker], each, rtol=1e-10, atol=1e-10)
    return bool(wanted)


def compare_many(first: int, count: int) -> int:
    return sum(compare(seed, 2 + seed % 3) for seed in range(first, first + count))


def test_random_programs_have_the_gradients_of_one_process(four: Workers) -> None:
    assert four.on(0, compare_many, 0, 40) > 20


@pytest.mark.long
def test_500_random_programs_have_the_gradients_of_one_process(four: Workers) -> None:
    assert four.on(0, compare_many, 1000, 500, limit=600) > 250


# -- kinds of gradients, and of calls --------------------------------------------------------------------


held: dict[str, Any] = {}


def table(name: str, make: Callable[[], Any]) -> Any:
    if name not in held:
        held[name] = make()
    return held[name]


def look_up(indices: Tensor) -> Tensor:
    layer = table("layer", lambda: torch.nn.Embedding(10, 2, sparse=True))
    found: Tensor = layer(indices)
    return found


def own_gradient(context_id: int, name: str) -> Tensor:
    return autograd.get_gradients(context_id)[held[name].weight]


def turn(value: Tensor) -> Tensor:
    return value * torch.tensor(1j, dtype=torch.complex128)


def scale(value: Tensor, factor: float = 2.0) -> Tensor:
    return value * factor


async def scale_later(value: Tensor) -> Tensor:
    later: Any = rpc.rpc_async("w2", scale, (value,))
    result: Tensor = await later
    return result


@rpc.async_execution
def scale_in_a_future(value: Tensor) -> Any:
    return rpc.rpc_async("w2", scale, (value,))


@rpc.async_execution
def scale_behind_another(value: Tensor) -> Any:
    """The second call is made where the answer to the first one is read."""
    first = rpc.rpc_async("w2", scale, (value,))
    return first.then(lambda done: rpc.rpc_sync("w2", scale, (done.wait(),)))


def scale_in_a_callback(value: Tensor) -> Tensor:
    found: queue.SimpleQueue[Tensor] = queue.SimpleQueue()
    first = rpc.rpc_async("w1", scale, (value,))
    first.add_done_callback(lambda done: found.put(rpc.rpc_sync("w2", scale, (done.value(),))))
    return found.get(timeout=30)


def scales(value: Tensor) -> Iterator[Tensor]:
    for factor in (1.0, 2.0, 3.0):
        yield value * factor


def there_and_back(value: Tensor) -> Tensor:
    return rpc.rpc_sync("w0", scale, (value,)) * 3


def first_of(values: dict[str, list[Tensor]]) -> Tensor:
    return values["a"][0] * values["a"][1]


class Raises(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, value: Tensor) -> Tensor:
        return value.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        raise ValueError("on purpose")


def raises_backward(value: Tensor) -> Tensor:
    made: Tensor = Raises.apply(value)  # type: ignore[no-untyped-call]
    return made


def gradient_of(value: Tensor, compute: Callable[[Tensor], Tensor]) -> Tensor:
    with autograd.context() as context_id:
        autograd.backward(context_id, [compute(value)])
        return autograd.get_gradients(context_id)[value]


def every_kind_of_call() -> None:
    ways: dict[str, tuple[Callable[[Tensor], Tensor], float]] = {
        "coroutine": (lambda x: rpc.rpc_sync("w1", scale_later, (x,)), 2),  # type: ignore[arg-type,return-value]
        "future": (lambda x: rpc.rpc_sync("w1", scale_in_a_future, (x,)), 2),
        "behind another": (lambda x: rpc.rpc_sync("w1", scale_behind_another, (x,)), 4),
        "callback": (scale_in_a_callback, 4),
        "stream": (lambda x: sum(rpc.rpc_stream("w1", scales, (x,))), 6),  # type: ignore[return-value,arg-type]
        "back": (lambda x: rpc.rpc_sync("w1", there_and_back, (x,)), 6),
        "self": (lambda x: rpc.rpc_sync("w0", scale, (x,)), 2),
        "operator": (lambda x: rpc.rpc_sync("w1", torch.add, (x, x)), 2),
        "remote operator": (lambda x: rpc.remote("w1", torch.mul, (x, 5)).to_here(), 5),
        "keyword": (lambda x: rpc.rpc_sync("w1", scale, (x,), {"factor": 7.0}), 7),
        "unchanged": (lambda x: rpc.rpc_sync("w1", scale, (x * 1, 1.0)), 1),
    }
    for name, (compute, factor) in ways.items():
        value = double(3.0, 2)
        got = gradient_of(value, lambda x, compute=compute: compute(x).sum())  # type: ignore[misc]
        assert got.tolist() == [factor, factor], name
        got.mul_(2)  # it has memory of its own


def test_gradients_flow_through_every_kind_of_call(four: Workers) -> None:
    four.on(0, every_kind_of_call)


def odd_gradients() -> None:
    # sparse
    with autograd.context() as context_id:
        loss = rpc.rpc_sync("w1", look_up, (torch.tensor([1, 1, 4]),)).sum()
        autograd.backward(context_id, [loss])
        got = rpc.rpc_sync("w1", own_gradient, (context_id, "layer"))
        assert got.is_sparse and got.to_dense()[1].tolist() == [2, 2]
    # a sparse tensor as argument
    value = torch.eye(2, dtype=torch.float64).to_sparse().requires_grad_()
    got = gradient_of(value, lambda x: rpc.rpc_sync("w1", scale, (x,)).to_dense().sum())
    assert got.to_dense().diagonal().tolist() == [2, 2]
    # complex
    value = torch.tensor([1 + 2j], requires_grad=True)
    got = gradient_of(
        value, lambda x: rpc.rpc_sync("w1", turn, (x.to(torch.complex128),)).real.sum()
    )
    again = value.detach().requires_grad_()
    turn(again.to(torch.complex128)).real.sum().backward()  # type: ignore[no-untyped-call]
    assert torch.equal(got, again.grad)  # type: ignore[arg-type]
    # two of one message, and a nested container
    value = double(3.0)
    pair = {"a": [value, value.view(())]}
    assert gradient_of(value, lambda _: rpc.rpc_sync("w1", first_of, (pair,))) == 6
    # what arrives may be changed in place
    assert gradient_of(value, lambda x: rpc.rpc_sync("w1", scale, (x,)).mul_(5)) == 10
    # a leaf that is sent amid inference
    with autograd.context() as context_id:
        with torch.inference_mode():
            result = rpc.rpc_sync("w1", scale, (value,))
        autograd.backward(context_id, [result])
        assert autograd.get_gradients(context_id)[value] == 2
    # hooks see the whole gradient, once
    seen: list[float] = []
    value.register_hook(lambda g: seen.append(float(g)))  # type: ignore[no-untyped-call]
    assert gradient_of(value, lambda x: rpc.rpc_sync("w1", scale, (x,)) + x) == 3
    assert seen == [1, 2] or seen == [3] or sum(seen) == 3, seen


def test_sparse_complex_and_changed_tensors_have_gradients(four: Workers) -> None:
    four.on(0, odd_gradients)


def unused_and_several() -> None:
    value, other = double(1.0), double(1.0)
    with autograd.context() as context_id:
        for _ in range(3):
            rpc.rpc_sync("w1", scale, (value,))  # takes no part
        near, far = (
            rpc.rpc_sync("w1", scale, (value,)),
            rpc.rpc_sync("w2", scale, (near_twice(value),)),
        )
        plain = rpc.rpc_sync("w1", scale, (torch.ones(2),))
        assert not plain.requires_grad
        autograd.backward(context_id, [near, far], retain_graph=True)
        assert autograd.get_gradients(context_id)[value] == 6
        autograd.backward(context_id, [near])
        assert autograd.get_gradients(context_id)[value] == 8
        assert other not in autograd.get_gradients(context_id)
        assert value.grad is None
        with pytest.raises(RuntimeError, match="a second time"):
            once = rpc.rpc_sync("w1", torch.mul, (value, value))
            autograd.backward(context_id, [once])
            autograd.backward(context_id, [once])


def near_twice(value: Tensor) -> Tensor:
    return value * 2


def test_sends_that_take_no_part_are_not_waited_for(four: Workers) -> None:
    four.on(0, unused_and_several)


tasks: list[Any] = []
begun: list[str] = []


async def begin_a_context_later() -> None:
    """In a task that outlives this call, and its context."""

    async def begin() -> None:
        await asyncio.to_thread(nothing_is_kept)
        try:
            with autograd.context():
                begun.append("a context of its own")
        except RpcError as error:
            begun.append(str(error))

    tasks.append(asyncio.create_task(begin()))


def what_begun() -> list[str]:
    return list(begun)


def outlive_a_context() -> None:
    with autograd.context():
        rpc.rpc_sync("w1", begin_a_context_later)
    eventually(lambda: rpc.rpc_sync("w1", what_begun), 20)
    assert rpc.rpc_sync("w1", what_begun) == ["a context of its own"]


def test_a_task_that_outlives_its_context_may_begin_one(four: Workers) -> None:
    four.on(0, outlive_a_context)


def step(module: torch.nn.Module, inputs: Tensor) -> tuple[list[str], bool]:
    kinds = [type(each).__name__ for each in module.parameters() if each.is_leaf]
    before = [each.detach().clone() for each in module.parameters()]
    module(inputs).sum().backward()
    torch.optim.SGD(module.parameters(), lr=1.0).step()
    changed = all(not old.equal(new) for old, new in zip(before, module.parameters(), strict=True))
    return kinds, changed


def weigh(weights: Tensor) -> Tensor:
    return (weights * 3).sum()


def send_a_module() -> None:
    module = torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.Linear(3, 1))
    alone = torch.nn.Parameter(torch.ones(2))
    with autograd.context() as context_id:
        found = rpc.rpc_sync("w1", step, (module, torch.ones(1, 2)))
        assert found == (["Parameter"] * 4, True)
        # A parameter by itself is a tensor of this worker, which wants its gradient.
        autograd.backward(context_id, [rpc.rpc_sync("w1", weigh, (alone,))])
        assert autograd.get_gradients(context_id)[alone].tolist() == [3, 3]


def test_a_module_arrives_with_parameters_in_a_context_too(four: Workers) -> None:
    four.on(0, send_a_module)


class Marked(torch.Tensor):
    """A subclass."""


def send_a_subclass() -> None:
    x = double(2.0, 2)
    with autograd.context() as context_id:
        autograd.backward(context_id, [rpc.rpc_sync("w1", weigh, (x.as_subclass(Marked),)).sum()])
        assert x not in autograd.get_gradients(context_id)


def test_a_tensor_of_a_subclass_passes_no_gradient(four: Workers) -> None:
    """As the documentation says."""
    four.on(0, send_a_subclass)


def say_no() -> None:
    with pytest.raises(RpcError, match="Could not find autograd context with id: 5"):
        autograd.backward(5, [double(1.0) * 2])
    with autograd.context() as context_id:
        with (
            pytest.raises(RpcError, match="Already have an autograd context id"),
            autograd.context(),
        ):
            pass
        for roots, error, text in (
            ([], RpcError, "No tensors provided"),
            ([None], TypeError, "incompatible function arguments"),
            (None, TypeError, "incompatible function arguments"),
            ([torch.ones(())], RpcError, "requires_grad not set on"),
            ([double(1.0, 2) * 2], RpcError, "is not a scalar, all roots need to be scalar"),
            ([double(1.0)], RpcError, "does not have a valid gradient function"),
        ):
            with pytest.raises(error, match=text):
                autograd.backward(context_id, roots)  # type: ignore[arg-type]
        result = rpc.rpc_sync("w1", scale, (double(1.0),))
        with pytest.raises(RpcError, match=r"rpc\.autograd\.backward"):
            result.backward()  # type: ignore[no-untyped-call]
        for _ in range(3):
            with pytest.raises(ValueError, match="on purpose"):
                failing = rpc.rpc_sync("w1", raises_backward, (double(1.0),))
                autograd.backward(context_id, [failing])
        autograd.backward(context_id, [result])
    with autograd.context() as later, pytest.raises(RpcError, match="another context|in context"):
        autograd.backward(later, [result * 2])
    with pytest.raises(RpcError, match="Could not find"):
        autograd.get_gradients(context_id)


def test_errors_name_what_is_wrong_and_the_next_pass_works(four: Workers) -> None:
    four.on(0, say_no)


def fails(compute: Callable[[Tensor], Tensor], owner: str = "") -> weakref.ref[Tensor]:
    """A pass that fails, or its optimizer on ``owner``; returns a reference to a variable of this function."""
    value = double(1.0)
    try:
        with autograd.context() as context_id:
            autograd.backward(context_id, [compute(value)])
            references = [rpc.rpc_sync(owner, my_parameter, (1.0,))]
            DistributedOptimizer(Fails, references, lr=0.1).step(context_id)
    except (RuntimeError, ValueError) as error:
        assert "on purpose" in str(error) or "no step" in str(error)
    return weakref.ref(value)


def failures_keep_no_frames() -> None:
    gc.disable()
    try:
        kept = [
            fails(raises_backward),
            fails(lambda value: rpc.rpc_sync("w1", raises_backward, (value,))),
            fails(lambda value: raises_backward(rpc.rpc_sync("w1", scale, (value,)))),
            fails(lambda value: rpc.rpc_sync("w1", scale, (value,)), "w0"),
            fails(lambda value: rpc.rpc_sync("w1", scale, (value,)), "w1"),
        ]
        eventually(lambda: not [at for at, each in enumerate(kept) if each() is not None], 1.0)
    finally:
        gc.enable()


def test_what_has_failed_is_freed_without_a_garbage_collection(four: Workers) -> None:
    four.on(0, failures_keep_no_frames)


def at_once(count: int) -> None:
    failures: list[BaseException] = []

    def one(number: int) -> None:
        try:
            value = double(float(number))
            for to in ("w1", "w2", "w3"):
                got = gradient_of(
                    value,
                    lambda x, to=to: rpc.rpc_sync(to, there_and_back, (x * x,)),  # type: ignore[misc]
                )
                assert got == 12 * number
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=one, args=(number,)) for number in range(count)]
    for each in threads:
        each.start()
    for each in threads:
        each.join()
    assert not failures, failures


def test_contexts_of_several_threads_and_workers_do_not_meet(four: Workers) -> None:
    four.run(at_once, 4)


def outside_nothing_is_recorded() -> None:
    result = rpc.rpc_sync("w1", scale, (double(1.0),))
    assert result.requires_grad and result.is_leaf
    nothing_is_kept()


def test_calls_outside_of_a_context_record_nothing(four: Workers) -> None:
    four.on(0, outside_nothing_is_recorded)


# -- the optimizer -----------------------------------------------------------------------------------------


def my_parameter(start: float) -> rpc.RRef[Tensor]:
    held["parameter"] = torch.nn.Parameter(torch.full((2,), start, dtype=torch.float64))
    return rpc.RRef(held["parameter"])


def times_parameter(value: Tensor) -> Tensor:
    result: Tensor = value * held["parameter"]
    return result


def parameter_now() -> Tensor:
    found: Tensor = held["parameter"].detach()
    return found


class Fails(torch.optim.SGD):
    def step(self, closure: Any = None) -> Any:
        raise ValueError("no step")


def from_references() -> None:
    value = double(2.0)
    with autograd.context() as context_id:
        there = rpc.remote("w1", scale, (value,))
        with pytest.raises(RpcError, match="works only on the value's owner"):
            there.backward()
        there.backward(context_id, retain_graph=True)
        there.backward(context_id, retain_graph=True)
        here = rpc.RRef(scale(there.to_here()))
        here.backward(context_id)
        assert autograd.get_gradients(context_id)[value] == 2 + 2 + 4


def test_a_reference_can_be_the_root(four: Workers) -> None:
    four.on(0, from_references)


def optimize(kind: Any, kwargs: dict[str, Any]) -> None:
    owners = ["w0", "w1", "w2"]
    references = [rpc.rpc_sync(name, my_parameter, (1.0 + at,)) for at, name in enumerate(owners)]
    optimizer = DistributedOptimizer(kind, references, **kwargs)
    alone = [torch.nn.Parameter(torch.full((2,), 1.0 + at, dtype=torch.float64)) for at in range(3)]
    expected = [kind([each], **kwargs) for each in alone]
    for _ in range(3):
        with autograd.context() as context_id:
            value = torch.tensor([1.0, 2.0], dtype=torch.float64)
            for name in owners[:2]:
                value = rpc.rpc_sync(name, times_parameter, (value,))
            autograd.backward(context_id, [value.sum()])
            optimizer.step(context_id)
        value = torch.tensor([1.0, 2.0], dtype=torch.float64) * alone[0] * alone[1]
        for each in expected:
            each.zero_grad()
        value.sum().backward()  # type: ignore[no-untyped-call]
        for each in expected:
            each.step()
    for name, each in zip(owners, alone, strict=True):
        assert torch.equal(rpc.rpc_sync(name, parameter_now), each.detach()), (kind, name)


def every_optimizer() -> None:
    for name in (
        "SGD",
        "Adam",
        "AdamW",
        "Adagrad",
        "RMSprop",
        "Adadelta",
        "Adamax",
        "Rprop",
        "NAdam",
        "RAdam",
        "ASGD",
    ):
        optimize(getattr(torch.optim, name), {"lr": 0.1})
    references = [rpc.rpc_sync(name, my_parameter, (1.0,)) for name in ("w1", "w2")]
    with pytest.raises(TypeError, match="unexpected keyword") as raised:
        DistributedOptimizer(torch.optim.SGD, references, no_such=1)
    assert "w2" in "".join(raised.value.__notes__)
    failing = DistributedOptimizer(Fails, references, lr=0.1)
    with autograd.context() as context_id, pytest.raises(ValueError, match="no step"):
        failing.step(context_id)
    with pytest.raises(RpcError, match="Could not find"):
        failing.step(context_id)
    with pytest.raises(ValueError, match="empty"):
        DistributedOptimizer(torch.optim.SGD, [], lr=0.1)
    with warnings.catch_warnings():
        # torch compiles its functional optimizers when they are imported, and calls that deprecated.
        warnings.simplefilter("ignore", DeprecationWarning)
        from torch.distributed.optim import PostLocalSGDOptimizer, functional_sgd
    wrong: Any
    for wrong, message in (
        (
            functional_sgd._FunctionalSGD,
            "derived from torch.optim.Optimizer, such as torch.optim.SGD",
        ),
        (torch.optim.SGD([torch.ones(1)]), "expected a class"),
        (PostLocalSGDOptimizer, "averages over a process group: use it there"),
        (torch.optim.LBFGS, r"LBFGS, whose step\(\) needs a closure"),
    ):
        with pytest.raises(TypeError, match=message) as raised:
            DistributedOptimizer(wrong, references, lr=0.1)
        # It was refused here: nothing was sent.
        assert not hasattr(raised.value, "__notes__")


def test_an_optimizer_steps_on_every_owner(four: Workers) -> None:
    four.on(0, every_optimizer)
    four.run(held.clear)


def late_for_a_pass() -> None:
    with autograd.context() as context_id:
        value = double(1.0)
        loss = rpc.rpc_sync("w1", scale, (value * 1,))
        autograd.backward(context_id, [loss], retain_graph=True)
        number = next(iter(rpc.rpc_sync("w1", sent_numbers, (context_id,))))
        autograd.backward(context_id, [loss], retain_graph=True)
        # A message of the first pass, which its sender repeats or sends late.
        args = (context_id, 0, 1, 1, False, number, torch.ones((), dtype=torch.float64))
        with pytest.raises(RpcError, match="the backward pass is over"):
            served.call(1, served.receive_gradients, args).wait()
        assert autograd.get_gradients(context_id)[value] == 4


def sent_numbers(context_id: int) -> list[int]:
    return list(current_agent().contexts.get(context_id).sent())


def test_a_late_message_of_an_earlier_pass_changes_nothing(four: Workers) -> None:
    four.on(0, late_for_a_pass)


# -- modules on other workers --------------------------------------------------------------------------------


def use_remote_module(module: rpc.RemoteModule, value: Tensor) -> Tensor:
    """Runs on a third worker, which the module is sent to."""
    result: Tensor = module(value)
    return result


def train_a_remote_module() -> None:
    module = rpc.RemoteModule("w1/cpu", torch.nn.Linear, (2, 1), {"dtype": torch.float64})
    value = torch.tensor([1.0, 2.0], dtype=torch.float64)
    weight, bias = module.remote_parameters()
    assert weight.owner_name() == "w1" and weight.to_here().shape == (1, 2)
    before = weight.to_here().detach()
    optimizer = DistributedOptimizer(torch.optim.SGD, [weight, bias], lr=0.5)
    with autograd.context() as context_id:
        here = module.forward_async(value)
        there = rpc.rpc_sync("w2", use_remote_module, (module, value))
        assert torch.equal(here.wait(), there)
        autograd.backward(context_id, [here.wait().sum() + there.sum()])
        optimizer.step(context_id)
    assert torch.equal(weight.to_here(), before - 0.5 * 2 * value)
    dropout = rpc.RemoteModule("rank:2", torch.nn.Dropout, (1.0,))
    assert dropout(torch.ones(3)).sum() == 0
    assert dropout.eval()(torch.ones(3)).sum() == 3
    again = rpc.RemoteModule.from_module_rref(dropout.get_module_rref())
    assert again.on == "w2" and again(torch.ones(3)).sum() == 3
    with pytest.raises(ValueError, match=r"``parameters`` not supported.*remote_parameters"):
        module.parameters()
    with pytest.raises(ValueError, match="returns an instance of <class nn.Module>"):
        rpc.RemoteModule("w1", dict)
    for text in ("", "rank:one", "w1/nowhere"):
        with pytest.raises(ValueError, match="remote_device is"):
            rpc.RemoteModule(text, torch.nn.Linear, (1, 1))
    with pytest.raises(TypeError, match="reference is to a float"):
        rpc.RemoteModule.from_module_rref(rpc.remote("w1", float))()  # type: ignore[arg-type]


def test_a_module_on_another_worker_is_used_and_trained(four: Workers) -> None:
    four.on(0, train_a_remote_module)


# -- DDP within a context --------------------------------------------------------------------------------------


def train_with_ddp(store: str, rank: int) -> list[float]:
    """Two trainers; a table and a second layer are on w3."""
    torch.distributed.init_process_group(
        "gloo", init_method=f"file://{store}", rank=rank, world_size=2
    )
    try:
        torch.manual_seed(0)
        first, second = (torch.nn.Linear(2, 2, dtype=torch.float64) for _ in range(2))
        dense = torch.nn.ModuleList([first, second])
        model = torch.nn.parallel.DistributedDataParallel(_Dense(dense))
        autograd.average(model)
        first.weight.grad = torch.full_like(first.weight, 7.0)  # not touched
        found = []
        for step in range(2):
            value = double(1.0 + rank + step, 1, 2)
            with autograd.context() as context_id:
                autograd.backward(context_id, [model(value).sum()])
                gradients = autograd.get_gradients(context_id)
                got = [gradients[each] for each in dense.parameters()]
                expected = []
                for other in range(2):
                    again = torch.full((1, 2), 1.0 + other + step, dtype=torch.float64)
                    loss = second(torch.sin(first(again)) * 3).sum() + first(again).sum()
                    expected.append(torch.autograd.grad(loss, list(dense.parameters())))
                for at, each in enumerate(got):
                    torch.testing.assert_close(each, (expected[0][at] + expected[1][at]) / 2)
                assert value in gradients
            found += [float(each.sum()) for each in got]
        assert first.weight.grad.eq(7.0).all() and second.weight.grad is None
        return found
    finally:
        torch.distributed.destroy_process_group()


class _Dense(torch.nn.Module):
    def __init__(self, dense: torch.nn.ModuleList) -> None:
        super().__init__()
        self.dense = dense

    def forward(self, value: Tensor) -> Tensor:
        first, second = self.dense
        hidden = first(value)
        there = rpc.rpc_sync("w3", sine, (hidden,))
        result: Tensor = second(there * 3) + hidden
        return result


def sine(value: Tensor) -> Tensor:
    return torch.sin(value)


def test_ddp_averages_the_gradients_of_a_context(four: Workers, tmp_path: Path) -> None:
    both = [four.begin(rank, train_with_ddp, str(tmp_path / "store"), rank) for rank in range(2)]
    one, other = (each.result() for each in both)
    assert one == other


# -- allow-lists -------------------------------------------------------------------------------------------


@rpc.export
def exported_scale(value: Tensor) -> Tensor:
    return value * 2


@rpc.export
def exported_module() -> rpc.RRef[torch.nn.Module]:
    held["module"] = torch.nn.Identity()
    return rpc.RRef(held["module"])


def join_exported() -> None:
    rpc_workers.join(num_worker_threads=4, exported_only=True, allowed_modules=("torch.optim",))


def use_what_is_exported() -> None:
    value = double(1.0)
    assert gradient_of(value, lambda x: rpc.rpc_sync("w1", exported_scale, (x,))) == 2
    with autograd.context() as context_id:
        with pytest.raises(rpc.NotAllowed):
            rpc.rpc_sync("w1", scale, (value,))
        optimizer = DistributedOptimizer(torch.optim.SGD, [rpc.RRef(value)], lr=0.5)
        autograd.backward(context_id, [rpc.rpc_sync("w1", exported_scale, (value,))])
        optimizer.step(context_id)
        assert value.item() == 0.0
        with pytest.raises(rpc.NotAllowed):
            rpc.RemoteModule("w1", torch.nn.Linear, (1, 1))
        with pytest.raises(ValueError, match="returns an instance of <class nn.Module>"):
            rpc.RemoteModule("w1", torch.optim.SGD, ([value],))
        held_there = rpc.RemoteModule.from_module_rref(rpc.rpc_sync("w1", exported_module))
        with pytest.raises(rpc.NotAllowed, match="was not made by RemoteModule"):
            held_there(value)
        own = served.call(1, served.explore, (context_id, 1, 7, 7, False, [1 << 20]))
        with pytest.raises(RpcError, match="directed by the worker that began it"):
            own.wait()
        with pytest.raises(RpcError, match="ended by the worker that began it"):
            served.call(1, served.release, ([(1 << 48) + 1],)).wait()
        for numbers, wrong in (
            ((99, None), "has no sent tensor number 99"),
            ((1, 2.0), "is a float"),
        ):
            part = served.call(
                1, served.receive_gradients, (context_id, 0, 99, 99, False, *numbers)
            )
            with pytest.raises(RpcError, match=wrong):
                part.wait()


def test_allow_lists_hold_in_a_context() -> None:
    with Workers(2) as workers:
        workers.run(join_exported)
        workers.on(0, use_what_is_exported)
        workers.run(nothing_is_kept)


# -- losses --------------------------------------------------------------------------------------------------


gate = threading.Event()


class Waits(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, value: Tensor) -> Tensor:
        return value.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        gate.wait()
        return gradients[0]


def open_gate() -> None:
    gate.set()


def waits_backward(value: Tensor) -> Tensor:
    made: Tensor = Waits.apply(value)  # type: ignore[no-untyped-call]
    return made


def through(value: Tensor, names: list[str], last: Callable[..., Tensor]) -> Tensor:
    if not names:
        return last(value)
    return rpc.rpc_sync(names[0], through, (value * 2, names[1:], last)) * 2


def too_slow() -> None:
    with autograd.context() as context_id:
        loss = rpc.rpc_sync("w1", waits_backward, (double(1.0),))
        with pytest.raises(RpcTimeout):
            autograd.backward(context_id, [loss], timeout=0.2)


def lose_in_backward(names: list[str]) -> None:
    gate.clear()
    with autograd.context() as context_id:
        loss = rpc.rpc_sync(names[0], through, (double(1.0), names[1:], waits_backward))
        with pytest.raises(PeerLost):
            autograd.backward(context_id, [loss], timeout=100)


def test_a_lost_worker_ends_the_pass_at_once_and_nothing_is_kept() -> None:
    with Workers(4) as workers:
        workers.run(functools.partial(rpc_workers.join, num_worker_threads=4))
        workers.on(0, too_slow)
        workers.on(1, open_gate)
        workers.run(nothing_is_kept)
        # A worker in the middle, which knew the last one, is lost during the backward pass there.
        begun = workers.begin(0, lose_in_backward, ["w1", "w2"])
        workers.on(2, a_pass_is_here)
        workers.kill(2)
        begun.result()
        workers.run(nothing_is_kept)
        # The owner of a context is lost.
        workers.on(3, hold_from, "w1")
        workers.on(1, one_context_is_kept)
        workers.kill(3)
        workers.run(nothing_is_kept)


def one_context_is_kept() -> None:
    eventually(lambda: current_agent().contexts.counts()[0] == 1)


def a_pass_is_here() -> None:
    eventually(lambda: current_agent().contexts.counts()[1] == 1)


def hold_from(name: str) -> None:
    held["context"] = autograd.context()
    held["id"] = held["context"].__enter__()
    held["result"] = rpc.rpc_sync(name, through, (double(1.0), ["w0"], scale))
