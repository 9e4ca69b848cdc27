"""What becomes of a SIGTERM in a worker."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading

import pytest

from rallypoint.elastic.worker import termination
from rallypoint.elastic.worker.termination import Decision, Termination, Word


def test_a_signal_for_this_process_alone_acts_after_a_moment() -> None:
    decision = Decision()
    assert not decision.signalled()
    assert decision.moment_over()
    assert decision.signalled(), "the same signal, sent again by this process"


@pytest.mark.parametrize("word", [Word.TOLD, Word.STOP])
def test_a_signal_waits_while_the_job_stops(word: Word) -> None:
    decision = Decision()
    assert not decision.signalled()
    assert not decision.heard(word)
    assert not decision.moment_over()
    assert not decision.signalled(), "clusters repeat it"
    assert decision.heard(Word.END)
    assert decision.signalled()


def test_the_word_may_come_before_the_signal() -> None:
    decision = Decision()
    assert not decision.heard(Word.STOP)
    assert not decision.signalled()
    assert not decision.moment_over()
    assert not Decision().heard(Word.END), "there is none to act"


def test_a_signal_that_was_held_acts_at_the_end() -> None:
    decision = Decision()
    assert not decision.over()
    decision = Decision()
    decision.signalled()
    assert decision.over()
    assert not decision.over(), "once"


def test_children_do_not_get_it() -> None:
    with termination.Children().kept():
        child = subprocess.Popen(
            [sys.executable, "-c", "print('lives'); input()"], stdin=-1, stdout=-1
        )
    assert child.stdin and child.stdout
    assert child.stdout.readline() == b"lives\n"
    os.kill(child.pid, signal.SIGTERM)
    os.kill(child.pid, signal.SIGHUP)
    child.communicate(b"\n", timeout=60)
    assert child.returncode == 0
    assert signal.SIGTERM not in signal.pthread_sigmask(signal.SIG_BLOCK, ())


KEEPS_WORKERS = """
import torch
from torch.utils.data import DataLoader, TensorDataset
from rallypoint import elastic

data = TensorDataset(torch.arange(4))
loader = DataLoader(data, num_workers=1, persistent_workers=True)
with elastic.worker.termination.Children().kept():
    iterator = iter(loader)
next(iterator)
"""


def test_children_that_do_not_get_it_do_not_keep_a_process_that_exits() -> None:
    found = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", KEEPS_WORKERS],
        capture_output=True,
        timeout=120,
        check=False,
    )
    assert (found.returncode, found.stderr) == (0, b"")


HANGUP = """
import os, signal, sys, time
from rallypoint.elastic.worker import termination

def child(names):
    held = termination.Termination()
    held.begin()
    for name in names:
        os.kill(os.getpid(), getattr(signal, name))
    time.sleep(2 * termination.BEHIND)
    print(*names, flush=True)
    held.forget()
    os.kill(os.getpid(), signal.SIGHUP)

# In each order: of two that are pending, SIGHUP is delivered first.
for names in (["SIGTERM", "SIGHUP"], ["SIGHUP", "SIGTERM"], ["SIGHUP"]):
    pid = os.fork() or child(names)
    assert os.WTERMSIG(os.waitpid(pid, 0)[1]) == signal.SIGHUP
"""


def test_a_hangup_changes_nothing_only_if_it_comes_with_the_signal() -> None:
    found = subprocess.run(
        [sys.executable, "-c", HANGUP], capture_output=True, text=True, timeout=120, check=False
    )
    assert (found.returncode, found.stderr) == (0, "")
    assert found.stdout == "SIGTERM SIGHUP\nSIGHUP SIGTERM\n"


def test_outside_of_the_main_thread_signals_act_at_once() -> None:
    held = Termination()
    thread = threading.Thread(target=held.begin)
    thread.start()
    thread.join()
    assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL
    held.end()
