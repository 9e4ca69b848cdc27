"""What engines call a job and its nodes, as the report shows it."""

from __future__ import annotations

from rallypoint.launch.output.report import FailureReport
from rallypoint.launch.placement import engine_ids


def test_no_engine() -> None:
    assert engine_ids.found({"HOSTNAME": "h", "RALLY_HOST_NAME": "x", "JOB_ID": "7"}) == {}


def test_slurm_in_a_container() -> None:
    env = {
        "SLURM_JOB_ID": "7",
        "SLURM_STEP_ID": "0",
        "SLURMD_NODENAME": "n3",
        "SLURM_RESTART_COUNT": "",
        "KUBERNETES_SERVICE_HOST": "10.0.0.1",
        "HOSTNAME": "pod-1",
    }
    assert engine_ids.found(env) == {
        "slurm": {"job": "7", "step": "0", "node": "n3"},
        "kubernetes": {"pod": "pod-1"},
    }


def test_sge_is_not_taken_for_others_that_say_job_id() -> None:
    env = {"JOB_ID": "12", "SGE_TASK_ID": "undefined", "QUEUE": "all.q"}
    assert engine_ids.found(env) == {
        "sge": {"job": "12", "array_task": "undefined", "queue": "all.q"}
    }


def test_the_report_has_them_and_the_lost_hosts() -> None:
    report = FailureReport(
        failures=(),
        world_size=4,
        reason="node 1 is lost",
        lost_hosts=("n7",),
        engines={"slurm": {"job": "7"}},
    )
    record = report.to_json()
    assert (record["lost_hosts"], record["engines"]) == (["n7"], {"slurm": {"job": "7"}})
    again = FailureReport.from_json(record)
    assert (again.lost_hosts, again.engines) == (("n7",), {"slurm": {"job": "7"}})
