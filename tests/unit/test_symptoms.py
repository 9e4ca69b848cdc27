"""What a failure says about the root cause: real messages, by table; and chains, by property."""

from __future__ import annotations

import pytest
from hypothesis import given, strategies as st

from rallypoint._core.whole_writes import NOBODY_READS
from rallypoint.launch.output import symptoms
from rallypoint.launch.output.symptoms import Says


GLOO = "[/pytorch/third_party/gloo/gloo/transport/tcp/"
# torch 2.13's wording.
TABLE = [
    (Says.MISSING, "RuntimeError", "[Rank 0]: Ranks 1, 2 failed to pass monitoredBarrier in 2000 ms"),
    (
        Says.MISSING,
        "RuntimeError",
        f"Rank 1 failed to pass monitoredBarrier in 2000 ms\n Original exception:\n{GLOO}unbound_buffer.cc:81]"
        " Timed out waiting 2000ms for recv operation to complete",
    ),
    (
        Says.PEER_LOST,
        "RuntimeError",
        "Rank 2 successfully reached monitoredBarrier, but received errors while waiting for send/recv"
        " from rank 0. Please check rank 0 logs for faulty rank.",
    ),
    (Says.TIMED_OUT, "RuntimeError", f"{GLOO}unbound_buffer.cc:81] Timed out waiting 8000ms for recv operation to complete"),
    (Says.TIMED_OUT, "torch.distributed.DistStoreError", "wait timeout after 300000ms, keys: /default_pg/0//1"),
    (Says.TIMED_OUT, "torch.distributed.DistStoreError", "Timed out after 11 seconds waiting for clients. 1/2 clients joined."),
    (
        Says.TIMED_OUT,
        "torch.distributed.DistBackendError",
        "[Rank 0] Watchdog caught collective operation timeout: WorkNCCL(SeqNum=7, OpType=ALLREDUCE)"
        " ran for 600026 milliseconds before timing out.",
    ),
    (Says.TIMED_OUT, "RuntimeError", "Some NCCL operations have failed or timed out. Due to the asynchronous nature"),
    (Says.TIMED_OUT, "torch.distributed.DistNetworkError", "The client socket has timed out after 60000ms"),
    (Says.PEER_LOST, "RuntimeError", f"{GLOO}pair.cc:545] Connection closed by peer [127.0.0.1]:3133"),
    (Says.PEER_LOST, "RuntimeError", f"{GLOO}pair.cc:534] Read error [127.0.0.1]:3133: Connection reset by peer"),
    (Says.PEER_LOST, "RuntimeError", f"{GLOO}pair.cc:547] writev [127.0.0.1]:3133: Broken pipe"),
    (Says.PEER_LOST, "torch.distributed.DistBackendError", "NCCL error, ncclRemoteError: A call failed possibly"),
    (Says.PEER_LOST, "torch.distributed.DistNetworkError", "Failed to recv, got 0 bytes. Connection was likely closed."),
    (Says.PEER_LOST, "rallypoint.errors.PeerLost", "worker 'b' is gone"),
    (Says.CONNECTION, "ConnectionResetError", "[Errno 104] Connection reset by peer"),
    (Says.CONNECTION, "ConnectionError", "rank 1 has hung up"),
    (Says.CONNECTION, "BrokenPipeError", "[Errno 32] Broken pipe"),
    (Says.CONNECTION, "EOFError", ""),
    (Says.CAUSE, "EOFError", "Ran out of input"),
    (Says.CAUSE, "ValueError", "expected 3 channels"),
    (Says.CAUSE, "RuntimeError", "cannot restore: the request timed out"),
    (Says.CAUSE, "RuntimeError", "mat1 and mat2 shapes cannot be multiplied (3x4 and 5x6)"),
    (Says.CAUSE, "RuntimeError", "DataLoader worker (pid 7) is killed by signal: Killed."),
    # Clients of other servers, and settings.
    (Says.CAUSE, "requests.exceptions.ConnectionError", "HTTPConnectionPool: Connection refused"),
    (Says.CAUSE, "httpx.RemoteProtocolError", "peer closed connection without sending complete message body"),
    (Says.CAUSE, "botocore.exceptions.ReadTimeoutError", "object-store.example: Read timed out"),
    (Says.CAUSE, "psycopg2.OperationalError", "connection to server failed: Connection refused"),
    (Says.CAUSE, "ValueError", "bad --store-timeout: timeout must be positive"),
    (Says.CAUSE, "KeyError", "'gloo_timeout'"),
    (Says.CAUSE, "BrokenPipeError", f"[Errno 32] Broken pipe: {NOBODY_READS}"),
    # A library's own class around torch's message.
    (Says.PEER_LOST, "trainer.StepFailed", f"{GLOO}pair.cc:545] Connection closed by peer [127.0.0.1]:3133"),
]  # fmt: skip


@pytest.mark.parametrize(("expected", "kind", "message"), TABLE)
def test_what_a_message_says(expected, kind, message):
    assert symptoms.says((kind, message)) is expected


OWN = st.sampled_from([("ValueError", "bad"), ("KeyError", "'w'"), ("MemoryError", "")])
ECHO = st.sampled_from([(kind, message) for says, kind, message in TABLE if says is not Says.CAUSE])
LINKS = st.lists(st.one_of(OWN, ECHO), min_size=1, max_size=5)


@given(chain=st.lists(OWN, min_size=1, max_size=4))
def test_own_errors_alone_are_a_cause(chain):
    assert symptoms.chain_says(chain) is Says.CAUSE
    assert symptoms.telling(chain) == chain[0]


@given(before=st.lists(st.one_of(OWN, ECHO), max_size=3), first=ECHO)
def test_whatever_follows_a_lost_peer_is_a_symptom(before, first):
    """For example `raise RuntimeError("step failed") from error`, or a clean-up that fails."""
    assert symptoms.chain_says([*before, first]) is symptoms.says(first)


@given(before=st.lists(OWN, max_size=2), echo=ECHO, first=OWN)
def test_a_peer_lost_while_an_own_error_is_handled_hides_it_not(before, echo, first):
    chain = [*before, echo, first]
    assert symptoms.chain_says(chain) is Says.MASKED
    assert symptoms.says(symptoms.telling(chain)) is Says.CAUSE


@given(chains=st.lists(LINKS, min_size=1, max_size=4))
def test_of_a_group_the_most_telling_counts(chains):
    best = symptoms.chain_says(symptoms.best_chain(chains))
    assert best is min(symptoms.chain_says(chain) for chain in chains)


def test_texts_of_other_processes_are_no_links():
    remote = ("concurrent.futures.process._RemoteTraceback", "Connection closed by peer")
    assert symptoms.chain_says([("ValueError", "bad"), remote]) is Says.CAUSE


# -- stderr ---------------------------------------------------------------------------------------

PRINTED = [
    "epoch 1",
    "Traceback (most recent call last):",
    '  File "train.py", line 3, in <module>',
    "    work()",
    "ValueError: expected 3 channels",
    "in two lines",
    "[rank1]:[W1122 ProcessGroup.cpp:1] Warning: recvValue failed",
]


def test_the_last_traceback_on_stderr_is_read():
    assert symptoms.printed(PRINTED) == ("ValueError", "expected 3 channels\nin two lines")
    assert symptoms.printed(PRINTED[2:]) == ("ValueError", "expected 3 channels\nin two lines")
    assert symptoms.printed(["loss 0.1", "saved"]) is None
    twice = [*PRINTED, "Traceback (most recent call last):", '  File "x"', "KeyError: 'w'"]
    assert symptoms.printed(twice) == ("KeyError", "'w'")


def test_what_c_plus_plus_said_when_it_aborted_is_read():
    lines = ["terminate called after throwing an instance of 'gloo::IoException'"]
    lines += [f"  what():  {GLOO}pair.cc:545] Connection closed by peer [127.0.0.1]:3133"]
    assert symptoms.says(symptoms.printed(lines)) is Says.PEER_LOST


@given(st.lists(st.text(max_size=30), max_size=8))
def test_any_stderr_is_survived(lines):
    found = symptoms.printed(lines)
    assert found is None or isinstance(symptoms.says(found), Says)


def test_accused_ranks():
    assert symptoms.accused("Ranks 1, 12 failed to pass monitoredBarrier in 5 ms") == {1, 12}
    assert symptoms.accused("CheckpointException ranks:dict_keys([2])\nTraceback") == {2}
    assert symptoms.accused("Rank 1 is fine") == frozenset()
