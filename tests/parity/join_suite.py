"""Run torch's own tests of uneven inputs, from the installed wheel, against our Join in each of its modes.

    python tests/parity/join_suite.py
    python tests/parity/join_suite.py --mode planned --test test_ddp_grad_div_uneven_inputs

Nothing of the suite is copied. Its tests want two GPUs and NCCL; here they run on CPUs, over Gloo: what they move
to a device stays where it is. ``DistributedDataParallel.join``, by which they enter the block, gives our Join; where
a loop has to iterate over ``join.batches``, the ``range`` that the suite's module sees does so. Exits with 0 if all
that ran passed, 1 if not.
"""

import argparse
import builtins
import contextlib
import importlib
import json
import os
import platform
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final
from unittest import mock


sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from rallypoint.testing import CaseFailed, Ranks


SUITE: Final = "torch.testing._internal.distributed.distributed_test"
MODES: Final = {
    "torch": "torch's own Join",
    "classic": "one all-reduce per step, as in torch",
    "planned": "`steps=`",
    "batches": "`join.batches` with replay of the last batch",
    "hooks": "`join.batches`, `replay=False`",
}
OURS: Final = tuple(mode for mode in MODES if mode != "torch")
TESTS: Final = (
    "test_ddp_grad_div_uneven_inputs",
    "test_ddp_join_model_equivalence",
    "test_ddp_uneven_inputs_stop_iteration_sync_bn",
    "test_ddp_uneven_inputs",
    "test_ddp_uneven_input_join_disable",
    "test_ddp_uneven_input_exception",
    "test_ddp_join_respects_forward_sync_buffers_false",
)
NOTES: Final = {
    "test_ddp_uneven_inputs_stop_iteration_sync_bn": (
        "uses batch norm without running statistics instead of SyncBatchNorm, which needs an accelerator"
    ),
    "test_ddp_uneven_inputs": (
        "without torchvision's ResNet-50; images are 16 pixels wide instead of 1000, because a step would take half a minute on a CPU"
    ),
}
ABSENT: Final = {
    "ddp_under_dist_autograd_test.py, two tests of uneven inputs": (
        "not applicable: they use torch's distributed autograd"
    ),
    "test_join.py, test_zero_redundancy_optimizer.py": (
        "not in the wheel: these files are only in torch's repository"
    ),
}
OTHER_INTERVALS: Final = (
    "the test exchanges gradients in steps 0, n, 2n; hooks with a schedule require it in every n-th"
    " step (`accumulation=n`) and reject others"
)
WORLD_SIZE: Final = 3
# The sides of the images that the suite's convolutions get: with its own images, a step takes half a minute.
PIXELS: Final = 16
# Seconds for the ranks to import the suite, once.
IMPORTING: Final = 300.0

Result = dict[str, Any]


# --- on a rank -----------------------------------------------------------------------------------


def run_test(name: str, mode: str) -> Result:
    """Run one test of the suite in this rank's group. Returns how many of its cases passed, and how many were left out."""
    import torch
    import torch.distributed as dist

    body, case = _test_case(name)
    cases = {"passed": 0, "left_out": 0}
    run_case = getattr(case, "_run_uneven_inputs_test", None)

    def one_case(test_case: Any, mapping: Any, **options: Any) -> None:
        if mode in ("planned", "hooks") and test_case.sync_interval > 1:
            cases["left_out"] += 1
            return
        assert run_case is not None
        if isinstance(image := test_case.inp, torch.Tensor) and image.dim() == 4:
            test_case = test_case._replace(inp=image[..., :PIXELS, :PIXELS])
        run_case(test_case, mapping, **options)
        cases["passed"] += 1

    case._run_uneven_inputs_test = one_case
    with _on_cpus(), _joined_in(mode):
        body(case)
    dist.barrier()
    if not cases["passed"]:
        cases["passed"] = 1
    return cases


def prepare(ranks: Ranks) -> None:
    """Have the ranks import the suite, unless they have: no test should pay for that time."""
    if not ranks.pids:
        ranks.run(import_suite, limit=IMPORTING)


def import_suite() -> None:
    """Import it, and do nothing else."""
    _suite()


def _suite() -> Any:
    os.environ.update(BACKEND="gloo", WORLD_SIZE=str(WORLD_SIZE), TEMP_DIR="/nowhere")
    arguments, sys.argv = sys.argv, sys.argv[:1]  # torch's tests parse the command line
    try:
        return importlib.import_module(SUITE)
    finally:
        sys.argv = arguments


def _test_case(name: str) -> tuple[Callable[[Any], None], Any]:
    suite = _suite()
    suite.HAS_TORCHVISION = False  # type: ignore[attr-defined]
    import torch.distributed as dist
    from torch.testing._internal.common_utils import TestCase

    base = suite.DistributedTest._DistTestBase
    cls: Any = type("Case", (base, TestCase), {"rank": dist.get_rank(), "world_size": WORLD_SIZE})
    body = getattr(base, name)
    while hasattr(body, "__wrapped__"):  # it is skipped where there are no GPUs
        body = body.__wrapped__
    return body, cls("run")


def _without_statistics(module: Any) -> Any:
    """SyncBatchNorm runs on accelerators only."""
    for part in module.modules():
        if hasattr(part, "running_mean"):
            part.track_running_stats = False
            part.running_mean = part.running_var = part.num_batches_tracked = None
    return module


@contextlib.contextmanager
def _on_cpus() -> Iterator[None]:
    """What is moved to a device stays on the CPU."""
    import torch
    from torch import nn
    from torch.nn.parallel import DistributedDataParallel
    from torch.overrides import TorchFunctionMode

    class OnCpus(TorchFunctionMode):
        def __torch_function__(
            self, function: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            kwargs = dict(kwargs or {})
            if isinstance(kwargs.get("device"), int):
                kwargs["device"] = "cpu"
            return function(*args, **kwargs)

    construct = DistributedDataParallel.__init__

    def without_devices(self: Any, module: Any, *args: Any, **kwargs: Any) -> None:
        kwargs.pop("device_ids", None)
        construct(self, module, *args, **kwargs)

    def stay(self: Any, *_: Any, **__: Any) -> Any:
        return self

    def nothing(*_: Any, **__: Any) -> None:
        pass

    changes: list[tuple[Any, str, Any]] = [
        (nn.Module, "cuda", stay),
        (torch.Tensor, "cuda", stay),
        (DistributedDataParallel, "__init__", without_devices),
        (nn.SyncBatchNorm, "convert_sync_batchnorm", staticmethod(_without_statistics)),
        (torch.cuda, "set_device", nothing),
        (torch.cuda, "synchronize", nothing),
        (torch.cuda, "manual_seed", nothing),
        (torch.cuda, "current_device", lambda: torch.device("cpu")),
    ]
    with contextlib.ExitStack() as stack:
        for owner, name, value in changes:
            stack.enter_context(mock.patch.object(owner, name, value))
        stack.enter_context(OnCpus())
        yield


@contextlib.contextmanager
def _joined_in(mode: str) -> Iterator[None]:
    """``DistributedDataParallel.join`` gives our Join, in this mode."""
    from torch.nn.parallel import DistributedDataParallel

    from rallypoint.join import Join

    if mode == "torch":
        yield
        return
    entered: list[Any] = []

    def join(
        self: Any,
        divide_by_initial_world_size: bool = True,
        enable: bool = True,
        throw_on_early_termination: bool = False,
    ) -> Any:
        options: dict[str, Any] = {}
        if mode == "planned":
            here = sys._getframe(1).f_locals
            options["steps"] = here.get("num_iters", here.get("n_iters", 1))
        elif mode != "classic":
            options |= {"samples": lambda _: 1, "replay": mode == "batches"}
        return _entering(
            entered,
            Join(
                [self],
                enable,
                throw_on_early_termination,
                divide_by_initial_world_size=divide_by_initial_world_size,
                **options,
            ),
        )

    def steps(*args: int) -> Any:
        if not entered or mode not in ("batches", "hooks"):
            return builtins.range(*args)
        found = entered[-1]
        return (found.step for _ in found.batches([0] * len(builtins.range(*args))))

    suite: Any = sys.modules[SUITE]
    before = DistributedDataParallel.join
    DistributedDataParallel.join = join  # type: ignore[method-assign]
    suite.range = steps
    try:
        yield
    finally:
        DistributedDataParallel.join = before  # type: ignore[method-assign]
        del suite.range


@contextlib.contextmanager
def _entering(entered: list[Any], block: Any) -> Iterator[Any]:
    with block as join:
        if join._enable:  # otherwise it is no concern of ours how often the loop runs
            entered.append(join)
        try:
            yield join
        finally:
            del entered[:]


# --- the whole suite -----------------------------------------------------------------------------


def run(tests: Sequence[str], modes: Sequence[str], limit: float) -> dict[str, dict[str, Result]]:
    """Each test in each mode."""
    found: dict[str, dict[str, Result]] = {}
    with contextlib.closing(Ranks(WORLD_SIZE)) as ranks:
        for test in tests:
            for mode in modes:
                began = time.monotonic()
                result: Result
                try:
                    prepare(ranks)
                    result = {"result": "passed", **ranks.run(run_test, test, mode, limit=limit)[0]}
                except CaseFailed as error:
                    lines = [line for line in str(error).splitlines() if "Error" in line]
                    result = {"result": "failed", "error": lines[0] if lines else str(error)[-300:]}
                    result["details"] = str(error)
                result["seconds"] = round(time.monotonic() - began, 1)
                found.setdefault(test, {})[mode] = result
                print(f"{result['result']:8} {test} ({mode}, {result['seconds']} s)", flush=True)
    return found


def markdown(report: Mapping[str, Any]) -> str:
    """The report as a table."""
    versions = ", ".join(f"{name} {value}" for name, value in report["versions"].items())
    lines = [
        "# torch's own tests of uneven inputs",
        "",
        f"Results of torch's own tests with Rallypoint's Join. Generated by `tests/parity/join_suite.py`"
        f" ({versions}; {report['machine']}). The tests come from the installed torch, unchanged; they run on {WORLD_SIZE} ranks on CPUs, over Gloo.",
        "",
        *(f"- {mode}: {what}" for mode, what in MODES.items()),
        "",
        "| test | " + " | ".join(MODES) + " | |",
        "|---" * (len(MODES) + 2) + "|",
    ]
    for test, results in report["tests"].items():
        cells = [_cell(results.get(mode)) for mode in MODES]
        lines.append(f"| `{test}` | " + " | ".join(cells) + f" | {NOTES.get(test, '')} |")
    left_out = [
        test
        for test, results in report["tests"].items()
        if any(r.get("left_out") for r in results.values())
    ]
    if left_out:
        lines += ["", f"Cases left out of `{left_out[0]}`: {OTHER_INTERVALS}."]
    lines += ["", "| not run | |", "|---|---|"]
    missing = [test for test in TESTS if test not in report["tests"]]
    lines += [f"| `{test}` | not chosen: give `--test {test}` |" for test in missing]
    lines += [f"| {what} | {why} |" for what, why in ABSENT.items()]
    return "\n".join(lines) + "\n"


def _cell(result: Result | None) -> str:
    if result is None:
        return ""
    if result["result"] != "passed":
        return f"**failed**: {result['error'].strip()}"
    total = result["passed"] + result["left_out"]
    return "passes" if total == 1 else f"passes ({result['passed']} of {total} cases)"


def main(arguments: Sequence[str] | None = None) -> int:
    import torch

    import rallypoint

    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--test", action="append", choices=TESTS, help="repeatable; default: all")
    parser.add_argument("--mode", action="append", choices=MODES, help="repeatable; default: all")
    parser.add_argument("--limit", type=float, default=900.0, help="seconds for a test")
    parser.add_argument("--output", metavar="JSON", help="write all results there")
    parser.add_argument("--markdown", metavar="MD", help="write a table for readers there")
    parser.add_argument("--verbose", action="store_true", help="print tracebacks of failures")
    options = parser.parse_args(arguments)
    tests = run(options.test or TESTS, options.mode or list(MODES), options.limit)
    ours = [result for each in tests.values() for mode, result in each.items() if mode in OURS]
    for results in tests.values():
        for result in results.values():
            details = result.pop("details", "")
            if options.verbose and details:
                print(details)
    report = {
        "versions": {
            "torch": torch.__version__,
            "python": platform.python_version(),
            "rallypoint": rallypoint.__version__,
        },
        "machine": f"{platform.system()} {platform.machine()}, {os.cpu_count()} cores",
        "tests": tests,
    }
    if options.output:
        Path(options.output).write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    if options.markdown:
        Path(options.markdown).write_text(markdown(report), encoding="utf-8")
    return 1 if any(result["result"] != "passed" for result in ours) else 0


if __name__ == "__main__":
    sys.exit(main())
