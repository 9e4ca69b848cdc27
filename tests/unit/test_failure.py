"""Who is to blame, and failures as data: what other nodes, torchelastic and report.json see."""

from __future__ import annotations

import json
import signal
from dataclasses import replace

import pytest
from hypothesis import given, settings, strategies as st
from torch.distributed.elastic.multiprocessing.errors import ProcessFailure

from rallypoint.launch.output.failure import (
    Raised,
    WorkerFailure,
    failures_from_json,
    failures_to_json,
    in_order_of_blame,
    parse_line_from_worker,
    parse_stderr,
    torchelastic_record,
)
from rallypoint.launch.output.report import FailureReport
from rallypoint.launch.output.symptoms import Says


def raised(type_: str = "ValueError", message: str = "bad batch", at: float = 10.0) -> Raised:
    traceback = (
        f'Traceback (most recent call last):\n  File "train.py", line 3\n{type_}: {message}\n'
    )
    return Raised(type=type_, message=message, traceback=traceback, at=at, timestamp=1_700_000_000)


def failure(rank: int, **changes) -> WorkerFailure:
    defaults = {
        "host": "a",
        "node_rank": 0,
        "rank": rank,
        "local_rank": rank,
        "pid": 1000 + rank,
        "generation": 0,
        "exit_code": 1,
        "signal": None,
        "raised": None,
        "native_stack": "",
        "cause": "",
        "stderr": (),
        "at": 10.0,
        "stopped_by_us": False,
    }
    return WorkerFailure(**{**defaults, **changes})


def killed(rank: int, number: int = signal.SIGKILL, **changes) -> WorkerFailure:
    return failure(rank, exit_code=None, signal=number, **changes)


def failing(
    rank: int, at: float, type_: str = "ValueError", message: str = "bad", chains=(), **changes
):
    told = replace(raised(type_, message, at), chains=chains)
    return failure(rank, raised=told, at=at, **changes)


# torch 2.13's messages when the process at the other end is gone.
LOST = [
    ("RuntimeError", "[/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:545] Connection closed"
     " by peer [127.0.0.1]:31337. This may indicate a remote process is gone."),
    ("RuntimeError", "[../gloo/transport/tcp/unbound_buffer.cc:81] Timed out waiting 1800000ms for"
     " recv operation to complete; Application timeout caused pair closure, gloo timeout"),
    ("torch.distributed.DistBackendError", "NCCL error ... ncclRemoteError: A call failed possibly"
     " due to a network error or a remote process exiting prematurely."),
    ("torch.distributed.DistNetworkError", "The client socket has failed to connect"),
    ("torch.distributed.DistStoreError", "wait timeout after 300000ms, keys: /default_pg/0//1"),
    ("ConnectionResetError", "[Errno 104] Connection reset by peer"),
    ("BrokenPipeError", "[Errno 32] Broken pipe"),
    ("EOFError", ""),
    ("RuntimeError", "Gloo connectFullMesh failed with [../gloo/transport/tcp/pair.cc:144] no error"),
]  # fmt: skip


@pytest.mark.parametrize(("type_", "message"), LOST)
def test_a_lost_peer_is_a_symptom_even_if_seen_first(type_, message):
    symptom = failing(0, at=1.0, type_=type_, message=message)
    assert symptom.is_symptom()
    assert in_order_of_blame([symptom, failing(1, at=2.0)])[0].rank == 1
    assert in_order_of_blame([symptom, killed(1, at=2.0)])[0].rank == 1


@pytest.mark.parametrize(
    ("type_", "message"),
    [
        ("ValueError", "expected 3 channels"),
        ("torch.OutOfMemoryError", "CUDA out of memory. Tried to allocate 20.00 MiB"),
        ("RuntimeError", "mat1 and mat2 shapes cannot be multiplied (3x4 and 5x6)"),
        ("FileNotFoundError", "[Errno 2] No such file or directory: 'data'"),
        ("AssertionError", ""),
        ("SystemExit", "connection closed by peer"),
    ],
)
def test_other_failures_are_no_symptoms(type_, message):
    assert not failing(0, at=1.0, type_=type_, message=message).is_symptom()


def test_the_first_to_raise_is_to_blame_though_another_was_reaped_first():
    slow_to_end = failing(2, at=1.0)
    soon_dead = killed(0, signal.SIGABRT, at=1.5)
    assert [f.rank for f in in_order_of_blame([soon_dead, slow_to_end])] == [2, 0]


def test_a_worker_that_we_stopped_is_never_to_blame():
    stopped = killed(0, signal.SIGTERM, at=0.5, stopped_by_us=True)
    assert in_order_of_blame([stopped, failing(1, at=1.0)])[0].rank == 1
    lost = failing(1, at=1.0, type_="EOFError", message="")
    assert in_order_of_blame([stopped, lost])[0].rank == 1


def test_symptoms_alone_blame_the_first_of_them():
    lost = [failing(rank, at=5.0 - rank, type_="EOFError", message="") for rank in range(3)]
    assert [f.rank for f in in_order_of_blame(lost)] == [2, 0, 1]


def test_clocks_of_two_hosts_are_not_compared():
    here = failing(5, at=1_000_000.0, host="a")
    there = failing(1, at=1.0, host="b")
    assert in_order_of_blame([here, there])[0] is here
    assert in_order_of_blame([there, here])[0] is there


def test_a_symptom_on_the_first_host_yields_to_a_cause_on_another():
    here = failing(0, at=1.0, type_="ConnectionResetError", message="", host="a")
    there = failing(4, at=9.0, host="b")
    assert in_order_of_blame([here, there])[0] is there


def handling(rank: int, type_: str = "ValueError", message: str = "bad", **changes):
    told = replace(raised(type_, message), handled=True)
    return killed(rank, signal.SIGTERM, raised=told, stopped_by_us=True, **changes)


PRINTED = (
    "Exception in thread Thread-1:",
    "Traceback (most recent call last):",
    '  File "t.py"',
    "ValueError: bad",
)
PEER = (
    "RuntimeError",
    "[gloo/transport/tcp/pair.cc:545] Connection closed by peer [127.0.0.1]:3133",
)
MISSING = "[Rank 0]: Ranks 2 failed to pass monitoredBarrier in 2000 ms"
OF_EACH_KIND = {
    Says.CAUSE: failing(0, 9.0),
    Says.MASKED: failing(0, 9.0, *PEER, chains=((PEER, ("ValueError", "bad")),)),
    Says.HANDLED: handling(0, at=9.0),
    Says.PRINTED: killed(0, signal.SIGTERM, stopped_by_us=True, stderr=PRINTED, at=9.0),
    Says.MISSING: failing(0, 9.0, "RuntimeError", MISSING),
    Says.CONNECTION: failing(0, 9.0, "ConnectionRefusedError", "[Errno 111] Connection refused"),
    Says.TIMED_OUT: failing(0, 9.0, "RuntimeError", "Timed out waiting 8000ms for recv operation"),
    Says.LEFT_EARLY: failure(0, exit_code=0, at=9.0),
    Says.PEER_LOST: failing(0, 9.0, *PEER),
    Says.STOPPED: killed(0, signal.SIGTERM, stopped_by_us=True, at=9.0),
}  # fmt: skip


@pytest.mark.parametrize(("says", "worker"), OF_EACH_KIND.items())
def test_what_a_failure_says(says, worker):
    assert worker.says() is says
    assert worker.is_symptom() == (says in {*list(Says)[4:9], Says.MASKED})


@given(
    kinds=st.lists(st.sampled_from(list(Says)), min_size=1, max_size=6),
    hosts=st.lists(st.sampled_from("ab"), min_size=6, max_size=6),
    times=st.lists(st.floats(0, 100), min_size=6, max_size=6),
)
def test_who_says_the_most_is_to_blame_on_whatever_host_and_whenever(kinds, hosts, times):
    failures = [
        replace(OF_EACH_KIND[kind], rank=rank, host=hosts[rank], at=times[rank])
        for rank, kind in enumerate(kinds)
    ]
    report = FailureReport(failures=in_order_of_blame(failures), world_size=6)
    assert report.root_cause.says() is min(kinds)
    assert report.is_known == (min(kinds) <= Says.MISSING or min(kinds) is Says.LEFT_EARLY)
    assert report.to_json()["cause_known"] == report.is_known


@pytest.mark.parametrize(
    "worker",
    [
        failure(0, stderr=("Traceback (most recent call last):", '  File "t.py"', f"RuntimeError: {PEER[1]}")),
        failing(0, 1.0, "SystemExit", "1", stderr=("Traceback (most recent call last):", f"RuntimeError: {PEER[1]}")),
        killed(0, signal.SIGABRT, stderr=("terminate called", f"  what():  {PEER[1]}")),
        handling(0, *PEER),
        handling(0, "queue.Empty", ""),
        failing(0, 1.0, "RuntimeError", "step failed", chains=((("RuntimeError", "step failed"), PEER),)),
    ],
)  # fmt: skip
def test_echoes_are_known_in_any_dress(worker):
    """Printed and exited, aborted, being handled, wrapped: the worker that was killed is to blame."""
    assert in_order_of_blame([worker, killed(1, at=5.0)])[0].rank == 1
    assert worker.says() not in {Says.CAUSE, Says.HANDLED, Says.PRINTED}


def test_a_sigkill_is_a_cause_whatever_it_had_printed():
    assert killed(0, stderr=(*PRINTED[:-1], f"RuntimeError: {PEER[1]}")).says() is Says.CAUSE


def test_the_accused_is_named_before_those_that_accuse_it():
    """All ranks of a distributed checkpoint raise the same error, which says whose fault it is."""
    message = "CheckpointException ranks:dict_keys([2])\nTraceback: No space left on device"
    failures = [failing(rank, 1.0 + rank, "CheckpointException", message) for rank in range(4)]
    assert in_order_of_blame(failures)[0].rank == 2


def test_who_was_handling_an_error_when_stopped_exits_with_1():
    assert handling(0).command_exit_code == 1
    assert handling(0).headline() == "was handling ValueError when it was stopped"


TEXT = st.text(max_size=40)
RAISED = st.builds(
    Raised,
    type=st.sampled_from(["ValueError", "SystemExit", "EOFError", "RuntimeError"]),
    message=st.one_of(TEXT, st.just("Connection closed by peer")),
    traceback=TEXT,
    at=st.floats(0, 1e6),
    timestamp=st.integers(0, 2**31),
    exited=st.booleans(),
    handled=st.booleans(),
    chains=st.lists(st.lists(st.tuples(TEXT, TEXT), max_size=2).map(tuple), max_size=2).map(tuple),
)
FAILURES = st.builds(
    WorkerFailure,
    host=st.sampled_from(["a", "b"]),
    node_rank=st.integers(0, 3),
    rank=st.integers(0, 100),
    local_rank=st.integers(0, 7),
    pid=st.integers(1, 99999),
    generation=st.integers(0, 3),
    exit_code=st.one_of(st.none(), st.integers(1, 255)),
    signal=st.one_of(st.none(), st.integers(1, 64)),
    raised=st.one_of(st.none(), RAISED),
    native_stack=TEXT,
    cause=TEXT,
    stderr=st.lists(TEXT, max_size=3).map(tuple),
    at=st.floats(0, 1e6),
    stopped_by_us=st.booleans(),
)


@settings(deadline=None)
@given(failures=st.lists(FAILURES, max_size=6))
def test_blame_loses_and_invents_nobody(failures):
    ordered = in_order_of_blame(failures)
    assert sorted(map(repr, ordered)) == sorted(map(repr, failures))
    assert [f.rank for f in ordered[1:]] == sorted(f.rank for f in ordered[1:])
    if ordered:
        assert ordered[0].says() is min(each.says() for each in failures)


@settings(deadline=None)
@given(failures=st.lists(FAILURES, max_size=4))
def test_failures_survive_the_journey_to_another_node(failures):
    assert failures_from_json(failures_to_json(failures)) == tuple(failures)


# -- exit codes and words -------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("worker", "code", "headline"),
    [
        (failure(0, exit_code=3), 3, "exited with code 3"),
        (killed(0), 137, "was killed by SIGKILL"),
        (killed(0, signal.SIGSEGV), 139, "was killed by SIGSEGV"),
        (killed(0, 34), 162, "was killed by SIGRTMIN"),
        (killed(0, 40), 168, "was killed by signal 40"),
        (failing(0, 1.0), 1, "raised ValueError"),
        (failure(0, exit_code=3, raised=raised("SystemExit", "3")), 3, "exited with code 3"),
    ],
)
def test_exit_code_and_headline(worker, code, headline):
    assert worker.command_exit_code == code
    assert worker.headline() == headline
    assert FailureReport(failures=(worker,), world_size=1).exit_code == code


def test_a_job_that_no_worker_failed_exits_with_1_and_blames_nobody():
    report = FailureReport(
        failures=(killed(0, stopped_by_us=True),), world_size=2, reason="its fork server was killed"
    )
    assert report.exit_code == 1
    assert report.root_cause is None
    assert [f.rank for f in report.victims] == [0]
    assert report.to_json()["root_cause"] is None
    assert [victim["rank"] for victim in report.to_json()["victims"]] == [0]


def test_json_has_every_field():
    root = failing(1, at=2.0, stderr=("last words",))
    report = FailureReport(
        failures=(root, killed(0, stopped_by_us=True)), world_size=2, log_folder="/logs/attempt_0"
    )
    data = json.loads(json.dumps(report.to_json()))
    assert data["version"] == 1
    assert data["world_size"] == 2
    assert data["exit_code"] == 1
    assert data["log_folder"] == "/logs/attempt_0"
    cause = data["root_cause"]
    assert cause["host"] == "a"
    assert (cause["rank"], cause["local_rank"], cause["pid"]) == (1, 1, 1001)
    assert cause["raised"]["type"] == "ValueError"
    assert cause["raised"]["traceback"].startswith("Traceback")
    assert cause["stderr"] == ["last words"]
    assert cause["headline"] == "raised ValueError"
    assert data["victims"][0]["signal_name"] == "SIGKILL"


# -- torchelastic's format, read by torchelastic ---------------------------------------------------


@pytest.mark.parametrize(
    ("worker", "timestamp"),
    [(failing(0, at=1.0), 1_700_000_000), (killed(0), 0), (failure(0, exit_code=7), 0)],
)
def test_torchelastic_reads_our_error_file(tmp_path, worker, timestamp):
    file = tmp_path / "error.json"
    file.write_text(json.dumps(torchelastic_record(worker)))
    read = ProcessFailure(local_rank=0, pid=1, exitcode=1, error_file=str(file))
    assert read.timestamp == timestamp
    assert read.message["errorCode"] == worker.command_exit_code
    expected = "ValueError: bad" if worker.raised else worker.headline()
    assert read.message["message"] == expected


# -- what a worker says on its line ----------------------------------------------------------------

RECORD = {
    "kind": "exception",
    "type": "ValueError",
    "message": "m",
    "traceback": "t",
    "at": 1.5,
    "timestamp": 7,
}


def test_the_line_carries_exceptions_and_native_stacks():
    data = b"Fatal Python error: Aborted\n\n" + json.dumps(RECORD).encode() + b"\n  File x\n"
    found, status, native, collectives = parse_line_from_worker(data)
    assert found == Raised(type="ValueError", message="m", traceback="t", at=1.5, timestamp=7)
    assert status is None
    assert native == "Fatal Python error: Aborted\n  File x"
    assert collectives == ()


DUMP = [
    "Fatal Python error: Segmentation fault",
    "Current thread 0x00007f02 (most recent call first):",
    '  File "/home/me/train.py", line 7 in step',
    "  ...",
    "Extension modules: numpy._core._multiarray_umath (total: 1)",
]


@pytest.mark.parametrize(
    ("lines", "dump", "others"),
    [
        (["loading", *DUMP], DUMP, ["loading"]),
        ([*DUMP, "core dumped"], DUMP, ["core dumped"]),
        ([f" 30%|### | 3/10{DUMP[0]}", *DUMP[1:]], DUMP, [" 30%|### | 3/10"]),
        (
            ["loading", "Timeout (0:00:30)!", *DUMP[1:4]],
            ["Timeout (0:00:30)!", *DUMP[1:4]],
            ["loading"],
        ),
        (["Timeout (0:00:30)!", *DUMP[1:4], "it went on"], [], None),
        (['  File "/home/me/train.py", line 7, in step', "ValueError: bad"], [], None),
        ([], [], None),
    ],
)
def test_a_stack_that_the_script_has_on_its_stderr_is_found(lines, dump, others):
    assert parse_stderr(lines) == ("\n".join(dump), lines if others is None else others)


def test_an_exception_comes_with_the_collectives_that_were_begun():
    group = {"name": "0 gloo", "about": "default_pg", "ranks": [0, 1], "calls": []}
    data = json.dumps({**RECORD, "collectives": [group]}).encode() + b"\n"
    assert parse_line_from_worker(data).collectives == (group,)
    data = json.dumps({**RECORD, "collectives": [{"name": 1}]}).encode() + b"\n"
    found = parse_line_from_worker(data)
    assert found.raised is not None
    assert found.collectives == ()


def test_the_line_carries_a_functions_status():
    found, status, native, _ = parse_line_from_worker(b'{"kind": "result"}\n')
    assert (found, native) == (None, "")
    assert json.loads(status) == {"kind": "result"}


@settings(deadline=None)
@given(
    st.one_of(
        st.binary(max_size=200),
        st.dictionaries(st.sampled_from([*RECORD, "other"]), st.one_of(TEXT, st.none())).map(
            lambda fields: json.dumps({"kind": "exception", **fields}).encode()
        ),
        st.sampled_from([json.dumps(RECORD).encode()[:n] for n in range(0, 90, 3)]),
        st.sampled_from(
            [b"{}", b"{1}", b"[]", b'{"kind": []}', b'{"kind": "exception", "at": {}}']
        ),
    )
)
def test_whatever_user_code_writes_on_the_line_is_survived(data):
    found, _status, native, _ = parse_line_from_worker(data)
    assert found is None or isinstance(found, Raised)
    assert isinstance(native, str)


def test_a_truncated_record_is_not_taken_for_a_stack():
    cut = json.dumps(RECORD).encode()[:40]
    assert parse_line_from_worker(cut) == (None, None, "", ())
