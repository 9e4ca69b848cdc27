"""Function launches over hosts: sizes, and what comes back."""

from __future__ import annotations

import pytest

from rallypoint import ray
from rallypoint.errors import ConfigError
from rallypoint.launch import MultiprocessConfig, host_functions, launch_subprocesses
from rallypoint.launch.host_functions import host_launch
from rallypoint.launch.hosts.call_files import Answer
from rallypoint.launch.output.failure import Raised, WorkerFailure
from rallypoint.launch.output.report import FailureReport
from rallypoint.launch.worker import payload


@pytest.mark.parametrize(
    ("hosts", "cfg", "sizes"),
    [
        (["a", "b"], MultiprocessConfig(world_size=4), [2, 2]),
        (["a:1", "b", "c"], MultiprocessConfig(world_size=5), [1, 2, 2]),
        (["a:3", "b"], MultiprocessConfig(local_world_size=2), [3, 2]),
        (["me@[fd00::1]:3", "b:1"], MultiprocessConfig(), [3, 1]),
    ],
)
def test_workers_of_each_host(hosts: list[str], cfg: MultiprocessConfig, sizes: list[int]) -> None:
    launch = host_launch(hosts, cfg)
    assert [each.workers for each in launch.hosts] == sizes
    assert launch.cfg.world_size == sum(sizes)


@pytest.mark.parametrize(
    ("hosts", "cfg", "field"),
    [
        (["a", "b"], MultiprocessConfig(), "hosts"),
        ("a,b", MultiprocessConfig(world_size=2), "hosts"),
        (["a", "a"], MultiprocessConfig(world_size=2), "hosts"),
        (["a", ""], MultiprocessConfig(world_size=2), "hosts"),
        (["a", "b"], MultiprocessConfig(world_size=3), "world_size"),
        (["a:2", "b:2"], MultiprocessConfig(world_size=3), "world_size"),
        (["a:2", "b"], MultiprocessConfig(world_size=2), "world_size"),
        (["a"], MultiprocessConfig(world_size=2, launch_method="fork"), "launch_method"),
        (["a"], MultiprocessConfig(world_size=2, rank=1), "rank"),
        (["a"], MultiprocessConfig(world_size=2, init_method="file:///x"), "init_method"),
    ],
)
def test_hosts_and_sizes_that_contradict(
    hosts: list[str], cfg: MultiprocessConfig, field: str
) -> None:
    with pytest.raises(ConfigError) as raised:
        host_launch(hosts, cfg)
    assert raised.value.field == field


class Elsewhere:
    """A third party's cluster."""

    def call_on_hosts(self, call: payload.Call, cfg: MultiprocessConfig) -> list[object]:
        return [(call.func(*call.args, **call.kwargs), cfg.world_size)]


def test_a_cluster_makes_the_call_itself() -> None:
    cfg = MultiprocessConfig(world_size=3)
    assert launch_subprocesses(int, cfg, "7", base=8, hosts=Elsewhere()) == [(7, 3)]
    with pytest.raises(ConfigError, match="ssh_options.*has no effect on such hosts"):
        launch_subprocesses(int, cfg, "7", hosts=Elsewhere(), ssh_options="-p 1")


def test_the_module_for_ray_is_one() -> None:
    assert isinstance(ray, host_functions.Cluster)
    assert isinstance(ray.Bundles(), host_functions.Cluster)
    for cfg in (MultiprocessConfig(), MultiprocessConfig(world_size=2, rank=1)):
        with pytest.raises(ConfigError):
            launch_subprocesses(int, cfg, hosts=ray)


def test_rays_own_module_is_none() -> None:
    with pytest.raises(ConfigError, match="from rallypoint import ray"):
        launch_subprocesses(int, MultiprocessConfig(world_size=2), hosts=pytest)  # type: ignore[arg-type]


def failure(rank: int, raised: Raised | None) -> WorkerFailure:
    return WorkerFailure(
        host="b",
        node_rank=1,
        rank=rank,
        local_rank=0,
        pid=7,
        generation=0,
        exit_code=1,
        signal=None,
        raised=raised,
        native_stack="",
        cause="",
        stderr=("a", "b"),
        at=1.5,
        stopped_by_us=raised is None,
    )


@pytest.mark.parametrize("reason", ["", "a node is lost"])
def test_a_report_comes_back_as_it_was(reason: str) -> None:
    raised = Raised(type="ValueError", message="é", traceback="t", at=1.0, timestamp=2)
    failures = (failure(3, raised), failure(0, None))
    report = FailureReport(failures=failures, world_size=4, log_folder="/x", reason=reason)
    answer = Answer.from_bytes(Answer(report=report.to_json()).to_bytes())
    assert answer.report is not None
    assert FailureReport.from_json(answer.report) == report
    assert Answer.from_bytes(Answer(results=(b"a\n", b"", b"c")).to_bytes()).results == (
        *(b"a\n", b"", b"c"),
    )
