"""A quick sample of torch's own RPC suite, run against Rallypoint; and the runner, run against torch.

All of it: ``python tests/parity/rpc_suite.py --against rallypoint``.
"""

import functools
import json
import os
import subprocess
import sys
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

from parity.rpc_groups import COMPARED, GROUPS, NOT_APPLICABLE, Method, find_methods, group_of
from parity.rpc_suite import UNAVAILABLE, choose, markdown
from parity.rpc_zygote import first_line, main_thread_place


pytestmark = pytest.mark.parity

SCRIPT = Path(__file__).with_name("rpc_suite.py")
SAMPLE = {
    "pure": [
        "RpcTest.test_add",
        "RpcTest.test_all_gather",
        "RpcTest.test_callback_chain",
        "RpcTest.test_duplicate_name_2",
        "RpcTest.test_function_not_on_callee",
        "RpcTest.test_non_cont_tensors",
        "RpcTest.test_py_class_instance_method",
        "RpcTest.test_py_nested_pickle",
        "RpcTest.test_rpc_barrier_subset",
        "RpcTest.test_wait_all",
        "RpcTest.test_wrong_types",
    ],
    "rref": [
        "RpcTest.test_async_class_rref_proxy",
        "RpcTest.test_local_value_not_on_owner",
        "RpcTest.test_rref_forward_chain",
        "RpcTest.test_rref_proxy_class",
        "RpcTest.test_rref_str",
        "RpcTest.test_user_rrefs_confirmed",
    ],
    "sparse": [
        "TensorPipeAgentRpcTest.test_my_parameter_server_sparse",
        "TensorPipeAgentRpcTest.test_send_to_rank_sparse",
    ],
    "dynamic": ["TensorPipeAgentRpcTest.test_dynamic_rpc_init_rpc"],
    "faulty": ["FaultyAgentRpcTest.test_custom_messages_to_delay"],
    "options": [
        "TensorPipeAgentRpcTest.test_mismatched_type_for_options",
        "TensorPipeAgentRpcTest.test_set_and_get_num_worker_threads",
    ],
    "examples": ["ParameterServerTest.test_batch_updating_parameter_server"],
    "script": ["RpcTest.test_wait_all_exit_early_script_function"],
    "device-map": ["TensorPipeAgentCudaRpcTest.test_device_map_cpu"],
    "autograd": [
        "DistAutogradTest.test_autograd_context",
        "DistAutogradTest.test_backward_different_dtypes",
        "DistAutogradTest.test_graph_for_py_nested_call_itself",
    ],
    "autograd-sparse": ["TensorPipeAgentDistAutogradTest.test_graph_for_builtin_call_sparse"],
    "autograd-faulty": ["FaultyAgentDistAutogradTest.test_context_cleanup_tensor_with_grad"],
    "optimizer": ["DistOptimizerTest.test_dist_optim"],
    "remote-module": ["ThreeWorkersRemoteModuleTest.test_send_remote_module_over_the_wire"],
    "ddp": ["DdpUnderDistAutogradTest.test_backward_ddp_outside"],
}
KEYS = [key for keys in SAMPLE.values() for key in keys]

THIS_SUITE = pytest.mark.skipif(
    not torch.__version__.startswith("2.13."), reason="the numbers are those of torch 2.13"
)


@functools.cache
def methods_of_the_suite() -> list[Method]:
    return find_methods()


def run(folder: Path, *arguments: str) -> tuple[int, dict[str, Any]]:
    """The runner's exit code and its report; skips where it has nothing to run against."""
    output = folder / "report.json"
    command = [sys.executable, str(SCRIPT), *arguments, "--output", str(output)]
    ended = subprocess.run(command, capture_output=True, text=True, check=False)
    if ended.returncode == UNAVAILABLE:
        pytest.skip(ended.stderr.strip())
    assert output.exists(), ended.stdout + ended.stderr
    return ended.returncode, json.loads(output.read_text())


# --- against Rallypoint --------------------------------------------------------------------------


@pytest.fixture(scope="module")
def sampled(tmp_path_factory: pytest.TempPathFactory) -> Mapping[str, Any]:
    chosen = [part for key in KEYS for part in ("--test", key)]
    _, report = run(tmp_path_factory.mktemp("sample"), "--against", "rallypoint", *chosen)
    return report["tests"]


@pytest.mark.timeout(600)
@pytest.mark.parametrize("key", KEYS)
def test_torchs_own_test_passes(key: str, sampled: Mapping[str, Any]) -> None:
    record = sampled[key]
    assert record["result"] == "passed", record.get("error") or record.get("reason")


# --- the runner ----------------------------------------------------------------------------------


@pytest.mark.long
@pytest.mark.timeout(300)
def test_a_test_that_hangs_is_ended_with_its_ranks_and_fails_the_run(tmp_path: Path) -> None:
    long, short = "RpcTest.test_rpc_timeouts", "RpcTest.test_use_rpc_pickler"  # over 6 s; no call
    arguments = ("--test", long, "--test", short, "--jobs", "1", "--timeout", "5", "--no-rerun")
    logs = tmp_path / "logs"
    code, report = run(tmp_path, "--against", "tensorpipe", *arguments, "--logs", str(logs))
    assert code == 1
    assert report["tests"][short]["result"] == "passed"
    assert report["tests"][long]["result"] == "timeout"
    assert "no end after 5 s; rank 0 in " in report["tests"][long]["error"]
    assert "Thread 0x" in (logs / long / "failure.txt").read_text()
    assert not [output for output in _outputs() if str(logs) in output]


def _outputs() -> list[str]:
    """Where all processes print: a rank prints into the folder of its test."""
    texts = []
    for process in Path("/proc").glob("[0-9]*"):
        try:
            texts.append(os.readlink(process / "fd" / "1"))
        except OSError:
            continue  # ended meanwhile, or not ours
    return texts


@THIS_SUITE
def test_every_test_of_the_suite_is_in_one_group() -> None:
    methods = methods_of_the_suite()
    sizes = Counter(method.group for method in methods)
    assert len({method.key for method in methods}) == len(methods) == 563
    assert [sizes[name] for name in COMPARED] == [
        *(95, 87, 24, 5, 20, 5, 2, 2, 1),
        *(63, 32, 2, 4, 16, 8),
    ]
    assert sizes["cuda"] == 99
    assert sizes.keys() == GROUPS.keys()


def test_a_helper_counts_as_what_the_test_does() -> None:
    by_key = {method.key: method.group for method in methods_of_the_suite()}
    assert by_key["RpcTest.test_world_size_one"] == "rref"  # rpc.remote is in a helper's helper
    assert by_key["RpcTest.test_wait_all_workers_dense"] == "pure"
    assert group_of("RpcTest", "test_new", frozenset({"rpc.rpc_sync"})) == "pure"
    assert group_of("RpcTest", "test_new", frozenset({"rpc.remote"})) == "rref"


def test_the_sample_has_each_compared_group_and_nothing_left_out() -> None:
    by_key = {method.key: method.group for method in methods_of_the_suite()}
    assert {group: [by_key[key] for key in keys] for group, keys in SAMPLE.items()} == {
        group: [group] * len(SAMPLE[group]) for group in COMPARED
    }
    assert not NOT_APPLICABLE.keys() & set(KEYS)


def test_reasons_are_for_tests_that_exist_and_are_compared() -> None:
    by_key = {method.key: method.group for method in methods_of_the_suite()}
    assert all(by_key[key] in COMPARED for key in NOT_APPLICABLE)


def test_a_test_that_does_not_exist_is_named() -> None:
    with pytest.raises(SystemExit, match=r"no test 'RpcTest\.test_none'"):
        choose(methods_of_the_suite(), COMPARED, ["RpcTest.test_none"])


CHAIN = """\
Traceback (most recent call last):
  File "a.py", line 1, in f
    g()
KeyError: 'inner'

During handling of the above exception, another exception occurred:

Traceback (most recent call last):
  File "b.py", line 2, in h
    raise ValueError(text)
          ^^^^^^^^^^^^^^^^
ValueError: On WorkerInfo(id=1, name=worker1):
Traceback (most recent call last):
  File "c.py", line 3, in k
OSError: on the other side
"""


def test_the_first_line_is_the_last_exceptions_not_one_inside_its_message() -> None:
    assert first_line(CHAIN) == "ValueError: On WorkerInfo(id=1, name=worker1):"
    assert first_line("no traceback at all\nmore") == "no traceback at all"


DUMP = """\
something printed
Thread 0x00007f (most recent call first):
  File "/lib/worker.py", line 9 in serve
Current thread 0x00007e (most recent call first):
  File "/lib/threading.py", line 320 in wait
  File "/lib/api.py", line 12 in rpc_sync
"""


def test_a_hanging_rank_is_where_its_main_thread_waits() -> None:
    assert main_thread_place(DUMP) == "in rpc_sync (api.py:12)"
    assert main_thread_place("killed before it wrote anything") == "somewhere unknown"


def test_the_table_counts_flaky_as_passed_and_puts_torch_beside() -> None:
    methods = methods_of_the_suite()
    tests = {
        "RpcTest.test_add": {"group": "pure", "result": "passed", "flaky": "rank 1: a | b"},
        "RpcTest.test_wait_all": {"group": "pure", "result": "timeout", "error": "no end"},
        "RpcTest.test_self_add": {"group": "pure", "result": "not applicable", "reason": "why"},
    }
    beside = {"tests": {"RpcTest.test_add": {"group": "pure", "result": "passed"}}}
    report = {"against": "rallypoint", "versions": {}, "machine": "", "tests": tests}
    text = markdown(report, methods, beside)
    row = next(line for line in text.splitlines() if line.startswith("| pure"))
    assert row.endswith("| 1 | 1 | 1 | 1 |")
    assert "| `RpcTest.test_wait_all` | timeout | no end |" in text
    assert "| `RpcTest.test_self_add` | not applicable | why |" in text
    assert "| `RpcTest.test_add` | passed | rank 1: a \\| b |" in text
    assert "| cuda: CUDA |" in text
