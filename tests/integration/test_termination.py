"""What becomes of real signals to a worker, whatever handler the script has set."""

from __future__ import annotations

import signal
import subprocess
import sys

import pytest

from supervisors import run


pytestmark = pytest.mark.integration

SCRIPT = """
import os, signal, sys, time
from rallypoint.elastic.worker import termination
from rallypoint.elastic.worker.termination import Termination, Word

termination.MOMENT = float(sys.argv[1])
if sys.argv[2] == "handler":
    signal.signal(signal.SIGTERM, lambda *_: (print("mine", flush=True), os._exit(3)))
if sys.argv[2] == "ignored":
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
held = Termination()
held.begin()
os.kill(os.getpid(), signal.SIGTERM)
print("lives", flush=True)
if sys.argv[3] == "stop":
    held.heed(Word.STOP)
    held.forget()
    os.kill(os.getpid(), signal.SIGTERM)
if sys.argv[3] == "leave":
    held.end()
if sys.argv[3] == "end":
    held.heed(Word.END)
if sys.argv[3] == "nothing":
    signal.pause()
"""


@pytest.mark.parametrize("then", ["stop", "leave", "end", "nothing"])
@pytest.mark.parametrize(
    ("script", "code", "said"), [("", -signal.SIGTERM, ""), ("handler", 3, "mine\n")]
)
def test_what_the_script_has_set_runs_in_the_end(
    then: str, script: str, code: int, said: str
) -> None:
    moment = "0.1" if then == "nothing" else "60"
    words = [sys.executable, "-c", SCRIPT, moment, script, then]
    done = run(words, capture_output=True, text=True, timeout=100)
    assert (done.returncode, done.stdout) == (code, f"lives\n{said}"), done.stderr


def test_a_signal_that_is_ignored_stays_so() -> None:
    words = [sys.executable, "-c", SCRIPT, "60", "ignored", "leave"]
    assert run(words, timeout=100).returncode == 0


STUCK = """
import ctypes, threading
from rallypoint.elastic.worker.termination import Termination, Word

held = Termination()
held.begin()

def supervise():
    print("stuck", flush=True)
    input()
    held.heed(Word.END)

threading.Thread(target=supervise, daemon=True).start()
mutex, libc = ctypes.create_string_buffer(64), ctypes.CDLL(None)
libc.pthread_mutex_lock(mutex)
libc.pthread_mutex_lock(mutex)  # no signal interrupts this, so Python runs no handler
"""


def test_a_process_that_hangs_outside_of_python_ends_when_it_is_told_to() -> None:
    child = subprocess.Popen([sys.executable, "-c", STUCK], stdin=-1, stdout=-1)
    try:
        assert child.stdin and child.stdout
        assert child.stdout.readline() == b"stuck\n"
        child.send_signal(signal.SIGTERM)
        child.communicate(b"\n", timeout=100)
        assert child.returncode == -signal.SIGTERM
    finally:
        child.kill()
        child.wait()
