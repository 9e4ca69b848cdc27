"""Why a generation ended, in one line for people and for the report."""

from __future__ import annotations

import dataclasses

from rallypoint.launch import policy
from rallypoint.launch.output.failure import Raised, WorkerFailure
from rallypoint.launch.policy import Verdict
from rallypoint.launch.supervision.causes import Causes


KILLED = WorkerFailure(
    host="a",
    node_rank=0,
    rank=1,
    local_rank=1,
    pid=7,
    generation=0,
    exit_code=None,
    signal=9,
    raised=None,
    native_stack="",
    cause="",
    stderr=(),
    at=1.0,
    stopped_by_us=False,
)
STOPPED = dataclasses.replace(KILLED, rank=2, local_rank=2, signal=15, stopped_by_us=True, at=2.0)


def state(verdict: Verdict, restarts: int = 0) -> policy.State:
    first = policy.State(max_restarts=3, grace=30.0)
    return dataclasses.replace(first, verdict=verdict, restarts=restarts)


def test_the_worker_to_blame_is_named_with_the_attempt() -> None:
    causes = Causes(failures=(KILLED,))
    told = causes.why_all_restart(state(Verdict.FAILED))
    assert told == "rank 1 was killed by SIGKILL; restarting all workers (attempt 2 of 4)"
    told = causes.why_all_restart(state(Verdict.SUSPECT, restarts=1))
    assert told.endswith("(not counted as an attempt if a node joined or left)")


def test_what_is_gone_counts_before_the_workers_that_died_of_it() -> None:
    causes = Causes(failures=(KILLED,))
    causes.note_lost("node 1 is lost")
    causes.note_lost("node 2 is lost")
    assert causes.why_all_restart(state(Verdict.FAILED)).startswith("node 1 is lost; restarting")
    causes.not_of_workers = "it hangs: nobody moves"
    assert causes.why_all_restart(state(Verdict.FAILED)).startswith("it hangs: nobody moves;")


def test_a_change_of_nodes_is_no_attempt() -> None:
    assert Causes().why_all_restart(state(Verdict.CHANGED)) == (
        "a node joined or left; restarting all workers"
    )


def test_a_node_that_restarts_its_workers_alone_says_so() -> None:
    assert Causes(lost="it was cut off").why_all_restart(state(Verdict.CHANGED), alone=True) == (
        "it was cut off; restarting this node's workers"
    )


def test_the_line_says_why_a_worker_of_a_session_is_not_replaced() -> None:
    causes = Causes(failures=(KILLED,), lost="node 1 is lost")
    for verdict in (Verdict.FAILED, Verdict.CHANGED):
        told = causes.why_all_restart(state(verdict), "--max-losses is 0")
        assert told.endswith("; not replaced: --max-losses is 0")
        assert told.startswith(causes.why_all_restart(state(verdict)))


def test_a_reason_that_is_the_cause_itself_is_said_once() -> None:
    why = "node 2 could not keep its workers"
    expected = f"{why}; restarting all workers"
    assert Causes(lost=why).why_all_restart(state(Verdict.CHANGED), why) == expected
    assert Causes().why_all_restart(state(Verdict.CHANGED), why) == expected


def test_an_echo_of_another_node_does_not_hide_what_was_told_before() -> None:
    causes = Causes()
    elsewhere = dataclasses.replace(KILLED, host="b", node_rank=1, rank=5)
    assert not causes.note_peers((elsewhere,))
    assert causes.note_peers((STOPPED,))
    assert causes.of_peers == (elsewhere,)
    # It counts if nothing else is known, and having no failures is not an echo.
    causes = Causes()
    assert causes.note_peers((STOPPED,))
    assert causes.of_peers == (STOPPED,)
    assert not causes.note_peers(())


def test_the_verdict_names_a_loss_only_if_no_worker_is_to_blame() -> None:
    causes = Causes(failures=(KILLED, STOPPED), lost="its fork server is gone")
    assert causes.verdict(None) == ((KILLED, STOPPED), "", ())
    causes = Causes(failures=(STOPPED,), lost="its fork server is gone")
    assert causes.verdict(None) == ((STOPPED,), "its fork server is gone", ())


def test_failures_that_other_nodes_told_fill_missing_reports() -> None:
    elsewhere = dataclasses.replace(KILLED, host="b", node_rank=1, rank=5)
    causes = Causes(failures=(STOPPED,), of_peers=(elsewhere,))
    failures, reason, _ = causes.verdict(())
    assert (failures[0], reason) == (elsewhere, "")
    assert causes.verdict((KILLED,))[0] == (KILLED,)


def test_workers_that_start_again_forget_it() -> None:
    causes = Causes(of_peers=(KILLED,), not_of_workers="a", lost="b", broken="c")
    assert causes.of_this_node == "a"
    causes.begin()
    assert causes == Causes()


LEFT = dataclasses.replace(KILLED, rank=3, local_rank=3, exit_code=0, signal=None, at=0.5)
LOST = Raised(
    type="RuntimeError", message="Connection closed by peer", traceback="", at=1.0, timestamp=1
)
ALONE = dataclasses.replace(KILLED, rank=0, local_rank=0, exit_code=1, signal=None, raised=LOST)


def test_a_rank_that_left_early_is_to_blame_if_all_others_only_lost_a_peer() -> None:
    causes = Causes(failures=(ALONE, STOPPED), left_early=(LEFT,))
    assert causes.verdict(None) == ((LEFT, ALONE, STOPPED), "", (3,))
    told = causes.why_all_restart(state(Verdict.FAILED))
    assert told.startswith("rank 3 ended while other ranks still needed it; restarting")


def test_a_rank_that_left_early_explains_nothing_beside_a_cause() -> None:
    causes = Causes(failures=(KILLED, ALONE), left_early=(LEFT,))
    assert causes.verdict(None) == ((KILLED, ALONE), "", ())


def test_of_several_that_left_early_the_first_is_shown_and_all_are_named() -> None:
    later = dataclasses.replace(LEFT, rank=4, at=0.7)
    causes = Causes(failures=(ALONE,), left_early=(later, LEFT))
    assert causes.verdict(None) == ((LEFT, ALONE), "", (3, 4))
    # Reported by another node.
    assert Causes().verdict((ALONE, later, LEFT)) == ((LEFT, ALONE), "", (3, 4))


def test_ranks_that_ended_well_do_not_fail_a_job_by_themselves() -> None:
    causes = Causes(left_early=(LEFT,), lost="node 1 is lost")
    assert causes.verdict(None) == ((), "node 1 is lost", ())
