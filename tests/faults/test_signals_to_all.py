"""A signal to every process of a job at once, as batch systems send it: workers get it, once, and nothing else dies of it."""

from __future__ import annotations

import signal

import pytest

from ports import free_port
from rallypoint._core import process


pytestmark = [pytest.mark.faults, pytest.mark.timeout(300)]

OTHERS = (signal.SIGUSR1, signal.SIGUSR2, signal.SIGALRM, signal.SIGCONT, signal.SIGRTMIN)


def to_all(job, number: int, *, workers_first: bool = False) -> None:
    """In the order of pids, or workers first: whoever signals a job knows nothing of its order."""
    pids = sorted(job.alive(), reverse=workers_first)
    assert len(pids) >= 5, "supervisor, fork server, store, two workers"
    process.send(pids, number)


def counts(job, number: int) -> list[str]:
    return list(job.notes(f"count.{int(number)}.*").values())


def start_two(start, *flags: str, method: str = "forkserver", **more):
    job = start(
        "--nproc-per-node", "2", "--start-method", method, *flags, script="saver.py", **more
    )
    job.workers(2)
    return job


@pytest.mark.parametrize(
    ("method", "number", "workers_first"),
    [
        ("forkserver", signal.SIGTERM, False),
        ("forkserver", signal.SIGHUP, True),
        ("exec", signal.SIGQUIT, True),
        ("exec", signal.SIGINT, False),
    ],
)
def test_workers_write_their_last_checkpoint(start, method, number, workers_first):
    job = start_two(start, "--signals-to-handle", "TERM,INT,HUP,QUIT", method=method)
    for other in OTHERS:  # workers handle these: they end nothing
        to_all(job, other, workers_first=workers_first)
        job.wait_for(f"count.{int(other)}.*", 2)
    to_all(job, number, workers_first=workers_first)
    assert job.end() == 128 + number
    expected = " ".join(f"{n}:1" for n in sorted(map(int, (*OTHERS, number))))
    assert list(job.notes("saved.0.*").values()) == [expected] * 2, "each worker got each once"
    assert f"stopped by {number.name}; all workers have ended" in job.stderr()
    assert not job.alive()


@pytest.mark.parametrize(
    ("method", "number", "workers_first"),
    [("exec", signal.SIGHUP, True), ("forkserver", signal.SIGQUIT, False)],
)
def test_workers_of_an_elastic_job_write_their_last_checkpoint(
    start, method, number, workers_first
):
    """On two nodes, each with a supervisor, a fork server and a worker; one of them serves the job's store."""
    flags = ("--nnodes", "2:3", "--rdzv-backend", "c10d", "--rdzv-conf", "last_call_timeout=0.1")
    flags += ("--rdzv-endpoint", f"127.0.0.1:{free_port()}", "--start-method", method)
    flags += ("--signals-to-handle", "TERM,INT,HUP,QUIT")
    nodes = [start(*flags, script="saver.py") for _ in range(2)]
    for node in nodes:
        node.workers(1)
    for other in (signal.SIGUSR1, number):
        to_all(nodes[0], other, workers_first=workers_first)
        if other == signal.SIGUSR1:  # workers handle it: it ends nothing
            for node in nodes:
                node.wait_for(f"count.{int(other)}.*", 1)
    assert [node.end() for node in nodes] == [128 + number] * 2
    expected = " ".join(f"{n}:1" for n in sorted((int(signal.SIGUSR1), int(number))))
    for node in nodes:
        assert list(node.notes("saved.0.*").values()) == [expected], "each worker got each once"
        assert f"stopped by {number.name}; all workers have ended" in node.stderr()
    assert not nodes[0].alive()


def test_what_no_worker_handles_is_named(start):
    job = start("--nproc-per-node", "2", worker=("--no-torch",))
    job.workers(2)
    to_all(job, signal.SIGUSR1)
    assert job.end() == 128 + signal.SIGUSR1
    assert "was killed by SIGUSR1" in job.stderr().split("rally: the job failed")[1]


def test_a_signal_to_pass_goes_to_workers_and_the_job_goes_on(start):
    job = start_two(start, "--signals-to-pass", "usr1,SIGALRM")
    job.kill(job.supervisor, signal.SIGUSR1)
    assert list(job.wait_for(f"count.{int(signal.SIGUSR1)}.*", 2).values()) == ["1", "1"]
    to_all(job, signal.SIGALRM)
    job.wait_for(f"count.{int(signal.SIGALRM)}.*", 2)
    for _ in range(2):
        job.kill(job.supervisor, signal.SIGUSR2)
    job.kill(job.server(), signal.SIGINT)
    job.kill(job.store(), signal.SIGTERM)
    job.kill(job.supervisor, signal.SIGTERM)
    assert job.end() == 128 + signal.SIGTERM
    assert list(job.notes("saved.0.*").values()) == ["10:1 14:1 15:1"] * 2
    assert job.stderr().count("use --signals-to-pass SIGUSR2") == 1


def test_what_was_held_back_is_not(start):
    """Started with SIGTERM blocked, SIGINT and SIGQUIT ignored (`&` in a script), SIGHUP ignored (nohup)."""

    def hold_back() -> None:
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM, signal.SIGUSR1})
        for number in (signal.SIGINT, signal.SIGQUIT, signal.SIGHUP):
            signal.signal(number, signal.SIG_IGN)

    job = start("--nproc-per-node", "2", worker=("--no-torch", "--saves"), preexec_fn=hold_back)
    pids = job.workers(2)
    for pid in (job.supervisor, job.server(), *pids):
        with open(f"/proc/{pid}/status") as file:
            fields = dict(line.rstrip().partition(":\t")[::2] for line in file)
        assert int(fields["SigBlk"], 16) == 0
        ignored = int(fields["SigIgn"], 16)
        assert ignored & 1 << signal.SIGHUP - 1
        assert not ignored & (1 << signal.SIGQUIT - 1 | 1 << signal.SIGINT - 1)
    to_all(job, signal.SIGHUP)
    job.kill(job.supervisor, signal.SIGINT)
    assert job.end() == 128 + signal.SIGINT
    assert len(job.notes("saved.*")) == 2
