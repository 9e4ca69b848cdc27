"""Which spans a job's events make."""

from __future__ import annotations

from collections.abc import Iterable

from hypothesis import given, strategies as st

from rallypoint import events
from rallypoint.tracing.timeline import Begin, End, Note, Step, Timeline


JOB_STARTED = events.JobStarted(
    run_id="llm", target="train.py", min_nodes=1, max_nodes=1, max_restarts=3
)


def round_formed(generation: int = 0) -> events.RoundFormed:
    return events.RoundFormed(run_id="llm", generation=generation, rank=0, num_nodes=1, seconds=0.5)


def generation_started(generation: int = 0) -> events.GenerationStarted:
    return events.GenerationStarted(
        run_id="llm", generation=generation, node_rank=0, num_nodes=1, world_size=2, restarts=0
    )


def generation_ended(aim: str, failed: tuple[int, ...] = ()) -> events.GenerationEnded:
    return events.GenerationEnded(generation=0, aim=aim, failed_ranks=failed)


def worker_started(rank: int) -> events.WorkerStarted:
    return events.WorkerStarted(generation=0, rank=rank, local_rank=rank, worker_pid=100 + rank)


def worker_ended(rank: int, error: str = "", *, stopped: bool = False) -> events.WorkerEnded:
    return events.WorkerEnded(
        generation=0,
        rank=rank,
        local_rank=rank,
        worker_pid=100 + rank,
        exit_code=1 if error else 0,
        signal=None,
        error=error,
        stopped=stopped,
    )


def worker_replaced(replaced: int) -> events.WorkerReplaced:
    return events.WorkerReplaced(
        generation=0, replaced=replaced, rank=1, node_rank=0, error="killed"
    )


def recovered(replaced: int) -> events.SessionRecovered:
    return events.SessionRecovered(
        generation=0,
        replaced=replaced,
        steps=7,
        repeated=False,
        formed=0.1,
        transferred=0.0,
        bytes_received=0,
    )


def job_ended(aim: str = "succeed", cause: str = "") -> events.JobEnded:
    return events.JobEnded(run_id="llm", aim=aim, generation=0, restarts=0, cause=cause)


NODE_LOST = events.NodeLost(run_id="llm", generation=0, rank=1, certain=True, reason="silent")


def shown(found: Iterable[events.Event], timeline: Timeline | None = None) -> list[str]:
    timeline = Timeline() if timeline is None else timeline
    return [_word(step) for event in found for step in timeline.take(event)]


def _word(step: Step) -> str:
    match step:
        case Begin():
            return f"+{step.name} in {step.parent}"
        case End():
            return f"-{step.key}" + (f": {step.error}" if step.error else "")
        case Note():
            return f"{step.name} in {step.key}"


def test_a_job_that_restarts_once() -> None:
    assert shown(
        [
            *(JOB_STARTED, round_formed(), generation_started()),
            *(worker_started(0), worker_started(1)),
            *(worker_ended(1, "raised ValueError"), worker_ended(0, "SIGTERM", stopped=True)),
            *(generation_ended("restart", (1,)), round_formed(1), generation_started(1)),
            *(generation_ended("succeed"), job_ended()),
        ]
    ) == [
        *("+job in None", "+rendezvous in job", "-rendezvous", "+generation 0 in job"),
        *("+rank 0 in generation", "+rank 1 in generation"),
        *("-worker 101: raised ValueError", "-worker 100"),
        *("-generation: ranks (1,) have failed", "+rendezvous in job", "-rendezvous"),
        *("+generation 1 in job", "-generation", "-job"),
    ]


def test_a_job_without_a_rendezvous() -> None:
    assert shown([JOB_STARTED, generation_started()])[-2:] == [
        "-rendezvous",
        "+generation 0 in job",
    ]


def test_a_job_that_fails_says_why() -> None:
    assert shown([JOB_STARTED, job_ended("fail", "no port")])[-1] == "-job: no port"


def test_a_recovery_lasts_until_all_are_back_and_ends_those_before_it() -> None:
    timeline = Timeline()
    shown([JOB_STARTED, generation_started()], timeline)
    begun = shown([worker_replaced(1), worker_replaced(2)], timeline)
    assert begun == ["+recovery in generation"] * 2
    assert shown([recovered(2)], timeline) == ["-recovery 1", "-recovery 2"]


def test_survivors_meet_again_after_the_loss_of_a_node() -> None:
    timeline = Timeline()
    shown([JOB_STARTED, round_formed(), generation_started()], timeline)
    found = shown([NODE_LOST, NODE_LOST, round_formed(1)], timeline)
    assert found == [
        *("node_lost in generation", "+rendezvous in job", "node_lost in generation"),
        "-rendezvous",
    ]


def test_a_process_without_a_job_has_its_rendezvous_alone() -> None:
    (begin, end) = Timeline().take(round_formed())
    assert isinstance(begin, Begin)
    assert (begin.parent, begin.seconds_ago) == (None, 0.5)
    assert isinstance(end, End)


def test_attributes_are_the_fields_that_say_something() -> None:
    (begin, _) = Timeline().take(JOB_STARTED)
    assert isinstance(begin, Begin)
    assert begin.attributes["rally.target"] == "train.py"
    timeline = Timeline()
    timeline.take(worker_started(0))
    (end,) = timeline.take(worker_ended(0))
    assert isinstance(end, End)
    assert "rally.signal" not in end.attributes


ANY = st.one_of(
    st.just(JOB_STARTED),
    st.builds(round_formed, st.integers(0, 2)),
    st.builds(generation_started, st.integers(0, 2)),
    st.builds(generation_ended, st.sampled_from(["restart", "succeed", "fail"])),
    st.builds(worker_started, st.integers(0, 2)),
    st.builds(worker_ended, st.integers(0, 2)),
    st.builds(worker_replaced, st.integers(1, 3)),
    st.builds(recovered, st.integers(1, 3)),
    st.just(NODE_LOST),
    st.just(events.SignalReceived(name="SIGTERM")),
    st.builds(job_ended),
)


@given(st.lists(ANY, max_size=30))
def test_whatever_comes_each_span_begins_and_ends_once_within_its_parent(
    found: list[events.Event],
) -> None:
    timeline = Timeline()
    steps = [step for event in found for step in timeline.take(event)]
    begun: dict[str, str | None] = {}
    for step in [*steps, *timeline.close()]:
        match step:
            case Begin():
                assert step.key not in begun
                assert step.parent is None or step.parent in begun
                begun[step.key] = step.parent
            case End():
                assert step.key not in begun.values(), "ended before a span below it"
                del begun[step.key]
            case Note():
                assert step.key in begun
    assert not begun
