"""The methods of torch's own RPC suite, each in one group, found in the installed wheel without running it.

A method's group follows from its class and name, and for the two big classes also from what its
source reaches: a test that touches ``rpc.remote`` or ``RRef``, itself or through a helper, is one
of ``rref``. Nothing here imports torch.
"""

import ast
import importlib.util
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final


@dataclass(frozen=True, kw_only=True, slots=True)
class Group:
    """A kind of test: what it is about, and why it is left out if it is."""

    title: str
    left_out: str | None = None
    """None: the group is compared. Otherwise the reason, as a reader of the table may know it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Method:
    """One test method of the suite."""

    file: str
    """Below ``torch/testing/_internal/distributed``, as ``rpc/rpc_test.py``."""
    cls: str
    """The class whose body has it; classes that inherit it do not count again."""
    name: str
    group: str

    @property
    def key(self) -> str:
        return f"{self.cls}.{self.name}"

    @property
    def agent(self) -> str:
        """Which of upstream's fixtures the class is mixed with."""
        return "faulty" if self.group.endswith("faulty") else "tensorpipe"


_SCRIPT = (
    "not applicable: TorchScript code calls RPC from inside the interpreter,"
    " which only torch's C++ agents can serve"
)

GROUPS: Final[Mapping[str, Group]] = {
    "pure": Group(title="calls, futures, timeouts, shutdown, gather and barrier"),
    "rref": Group(title="remote references"),
    "sparse": Group(title="sparse tensors in calls"),
    "dynamic": Group(title="groups without a fixed size"),
    "faulty": Group(title="messages that are delayed or lost"),
    "options": Group(title="options of the backend"),
    "examples": Group(title="parameter server, reinforcement learning"),
    "script": Group(title="scripted functions called from Python"),
    "device-map": Group(title="a device map with the CPU alone"),
    "autograd": Group(title="distributed autograd"),
    "autograd-sparse": Group(title="distributed autograd, sparse tensors"),
    "autograd-faulty": Group(title="distributed autograd, messages lost"),
    "optimizer": Group(title="DistributedOptimizer"),
    "remote-module": Group(title="RemoteModule"),
    "ddp": Group(title="DDP below distributed autograd"),
    "torchscript": Group(title="RPC from TorchScript", left_out=_SCRIPT),
    "torchscript-faulty": Group(title="RPC from TorchScript, messages lost", left_out=_SCRIPT),
    "profiler": Group(
        title="remote events in the profiler",
        left_out="not applicable: only torch's deprecated legacy profiler supports remote events",
    ),
    "cuda": Group(title="CUDA", left_out="not run: needs CUDA devices, mostly two"),
}
"""In the order of reports."""

COMPARED: Final = tuple(name for name, group in GROUPS.items() if group.left_out is None)

FILES: Final = (
    "rpc/rpc_test.py",
    "rpc/faulty_agent_rpc_test.py",
    "rpc/examples/parameter_server_test.py",
    "rpc/examples/reinforcement_learning_rpc_test.py",
    "rpc/dist_autograd_test.py",
    "rpc/dist_optimizer_test.py",
    "nn/api/remote_module_test.py",
    "ddp_under_dist_autograd_test.py",
    "rpc/jit/rpc_test.py",
    "rpc/jit/dist_autograd_test.py",
    "rpc/jit/rpc_test_faulty.py",
)

_INTERFACE = (
    "makes a RemoteModule with a TorchScript interface, which only torch's C++ agents can serve"
)
_ONE_COPY = (
    "expects that two leaves with the same gradient both get a copy; here one of them gets the gradient itself, and the"
    " other one a copy"
)

NOT_APPLICABLE: Final[Mapping[str, str]] = {
    "DistAutogradTest.test_trainer_ps_torchscript_functions": (
        "a TorchScript function calls RRef.to_here, which only torch's C++ agents can serve"
    ),
    "DistAutogradTest.test_backward_unused_send_function": (
        "expects that a backward pass hangs if a tensor that was sent takes no part in it; here it ends"
    ),
    "DistAutogradTest.test_no_grad_copy": _ONE_COPY,
    "DistAutogradTest.test_post_hooks": (
        "hooks on the nodes that accumulate leaves' gradients run only for parameters of DDP, since a gradient goes to the"
        " context and not to .grad"
    ),
    **{
        f"RemoteModuleTest.{name}": _INTERFACE
        for name in (
            "test_forward_async",
            "test_forward_async_script",
            "test_forward_sync",
            "test_forward_sync_script",
            "test_remote_module_py_pickle_not_supported_script",
        )
    },
    "ThreeWorkersRemoteModuleTest.test_send_remote_module_over_the_wire_script_not_supported": (
        _INTERFACE
    ),
    "RpcTest.test_custom_exception_throw_during_reconstruction": (
        "expects an exception with additional constructor arguments to arrive as a RuntimeError; here it"
        " keeps its type and attributes"
    ),
}
"""Tests of compared groups that cannot apply to Rallypoint, by key, each with its reason."""

_GROUP_OF_CLASS: Final[Mapping[str, str]] = {
    "CudaRpcTest": "cuda",
    "CudaDistAutogradTest": "cuda",
    "TensorPipeCudaDistAutogradTest": "cuda",
    "CudaRemoteModuleTest": "cuda",
    "CudaDdpComparisonTest": "cuda",
    "FaultyAgentRpcTest": "faulty",
    "FaultyAgentDistAutogradTest": "autograd-faulty",
    "JitFaultyAgentRpcTest": "torchscript-faulty",
    "TensorPipeAgentDistAutogradTest": "autograd-sparse",
    "DistOptimizerTest": "optimizer",
    "RemoteModuleTest": "remote-module",
    "ThreeWorkersRemoteModuleTest": "remote-module",
    "DdpUnderDistAutogradTest": "ddp",
    "DdpComparisonTest": "ddp",
    "ParameterServerTest": "examples",
    "ReinforcementLearningRpcTest": "examples",
    "RRefAPITest": "torchscript",
    "RRefTypingTest": "torchscript",
    "FutureTypingTest": "torchscript",
    "LocalRRefTest": "torchscript",
    "JitRpcOpTest": "torchscript",
    "JitRpcTest": "torchscript",
    "JitDistAutogradTest": "torchscript",
}
_OPTIONS: Final = frozenset(
    {
        "test_mismatched_type_for_options",
        "test_infer_backend_from_options",
        "test_set_and_get_num_worker_threads",
        "test_tensorpipe_set_default_timeout",
        "test_tensorpipe_options_throw_on_timedelta_timeout",
    }
)
_SCRIPTED: Final = frozenset(
    {
        "test_stress_heavy_rpc_torchscript",
        "test_wait_all_exit_early_script_function",
    }
)
_NO_PROFILE: Final = frozenset({"test_build_rpc_profiling_key", "test_disable_gil_profiling"})
"""Named after profiling, but about a string and about a debug value."""
_RREF: Final = frozenset({"rpc.remote", "RRef", "rpc.RRef"})


def group_of(cls: str, name: str, reached: frozenset[str]) -> str:
    """The group of ``cls.name``, whose source and helpers use the dotted names ``reached``."""
    if cls in _GROUP_OF_CLASS:
        return _GROUP_OF_CLASS[cls]
    if name.endswith("_cuda"):
        return "cuda"
    if cls == "TensorPipeAgentCudaRpcTest":
        return "device-map" if name == "test_device_map_cpu" else "cuda"
    if name not in _NO_PROFILE and ("profil" in name or "async_record_function" in name):
        return "profiler"
    if cls == "DistAutogradTest":
        return "autograd-sparse" if name.endswith("_sparse") else "autograd"
    if name.endswith("_rref_backward"):
        return "autograd"
    if "sparse" in name:
        return "sparse"
    if "dynamic_" in name:
        return "dynamic"
    if name in _OPTIONS:
        return "options"
    if name in _SCRIPTED:
        return "script"
    return "rref" if reached & _RREF else "pure"


def suite_folder() -> Path:
    """Where the installed torch keeps the suite; torch is found, not imported."""
    found = importlib.util.find_spec("torch")
    if found is None or found.origin is None:
        raise ModuleNotFoundError("torch is not installed; install it to run its RPC suite")
    return Path(found.origin).parent / "testing" / "_internal" / "distributed"


def find_methods(folder: Path | None = None) -> list[Method]:
    """All test methods of the suite, in the order of ``FILES`` and of their sources."""
    folder = suite_folder() if folder is None else folder
    return [method for file in FILES for method in _of_file(folder / file, file)]


def _of_file(path: Path, file: str) -> Iterator[Method]:
    tree = ast.parse(path.read_text(encoding="utf-8"))
    source = _Source(tree)
    for cls in tree.body:
        if not isinstance(cls, ast.ClassDef):
            continue
        for node in cls.body:
            if isinstance(node, ast.FunctionDef) and node.name.startswith("test"):
                group = group_of(cls.name, node.name, source.reached_from(node))
                yield Method(file=file, cls=cls.name, name=node.name, group=group)


class _Source:
    """One module's functions and methods, by the names under which its tests call them."""

    def __init__(self, tree: ast.Module) -> None:
        self._functions = {
            node.name: node for node in tree.body if isinstance(node, ast.FunctionDef)
        }
        classes = [node for node in tree.body if isinstance(node, ast.ClassDef)]
        self._owners = {"self"} | {cls.name for cls in classes}
        self._methods: dict[str, ast.FunctionDef] = {}
        for cls in classes:
            for node in cls.body:
                if isinstance(node, ast.FunctionDef):
                    self._methods.setdefault(node.name, node)

    def reached_from(self, start: ast.FunctionDef) -> frozenset[str]:
        """Dotted names in ``start`` and in all functions of the module that it leads to."""
        names: set[str] = set()
        seen = {start}
        ahead = [start]
        while ahead:
            for part in ast.walk(ahead.pop()):
                if (name := _dotted(part)) is None:
                    continue
                names.add(name)
                if (node := self._named(name)) is not None and node not in seen:
                    seen.add(node)
                    ahead.append(node)
        return frozenset(names)

    def _named(self, name: str) -> ast.FunctionDef | None:
        owner, _, attribute = name.partition(".")
        if not attribute:
            return self._functions.get(owner)
        return self._methods.get(attribute) if owner in self._owners else None


def _dotted(node: ast.AST) -> str | None:
    match node:
        case ast.Name(id=name):
            return name
        case ast.Attribute(value=value, attr=attribute):
            before = _dotted(value)
            return None if before is None else f"{before}.{attribute}"
        case _:
            return None
