"""The actor in a bundle: runs a supervisor there, as ``rally run --hosts`` does on a host.

The supervisor's parent is `rally node`, which ends it once this process has exited or stopped responding. So whatever
ends the actor (the driver, a lost raylet, ``ray stop``), nothing is left on the machine.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from dataclasses import dataclass, replace

import ray

from rallypoint.launch.hosts import orders
from rallypoint.launch.hosts.merging import Merger, Part
from rallypoint.launch.hosts.orders import Orders


@dataclass(frozen=True, kw_only=True, slots=True)
class NodeEnd:
    """How a node ended.

    Args:
        exit_code: its supervisor's exit code.
        answer: the report and the results (:class:`~rallypoint.launch.hosts.call_files.Answer`), as bytes.
    """

    exit_code: int
    answer: bytes


class NodeActor:
    """Runs one supervisor, from start to end."""

    def __init__(self) -> None:
        self._child: subprocess.Popen[bytes] | None = None
        self._writing = threading.Lock()
        self._ended = threading.Event()
        self._stopped = 0

    def __repr__(self) -> str:
        return "rally"  # before each line of its output

    def place(self) -> str:
        """The address of this node. Returns once the bundle has been placed and the actor runs."""
        return str(ray.util.get_node_ip_address())

    def run(self, line: bytes, call: bytes) -> NodeEnd:
        """Run the supervisor. Returns when it has ended.

        Args:
            line: its orders. If they name no folder, or one that does not exist here, the actor's own is used.
            call: a pickled function call; empty: workers run a script.
        """
        told = Orders.from_line(line)
        folder = told.folder if os.path.isdir(told.folder) else os.getcwd()
        here = ray.get_runtime_context()
        ids = {"RALLY_RAY_JOB": here.get_job_id(), "RALLY_RAY_NODE": here.get_node_id()}
        path = tuple(sys.path) if call else ()
        told = replace(told, folder=folder, path=path, env={**told.env, **ids})
        # Ray's workers block SIGINT, which their children would inherit.
        mask = signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
        try:
            child = subprocess.Popen(
                [sys.executable, "-m", "rallypoint", "node"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
            )
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        part = Part("")
        merger = Merger([part], told.token)
        assert child.stdin is not None
        assert child.stdout is not None
        try:
            for data in (told.to_line(), call):
                child.stdin.write(data)
            child.stdin.flush()
            self._child = child
            self.signal(self._stopped)
            threading.Thread(target=self._beat, name="rally-heartbeat", daemon=True).start()
            while data := os.read(child.stdout.fileno(), 65536):
                _show(merger.take(0, 1, data))
            _show(merger.take(0, 1, b""))
        except BrokenPipeError:
            pass  # it has ended
        finally:
            self._ended.set()
            with self._writing:
                self._child = None
            child.stdout.close()
            try:
                child.stdin.close()
            except BrokenPipeError:
                pass
            code = child.wait()
        return NodeEnd(
            exit_code=part.exit_code if part.exit_code is not None else code or 1,
            answer=bytes(part.answer),
        )

    def signal(self, number: int) -> None:
        """Pass a signal on to the supervisor, even if it has not been started yet."""
        self._stopped = number
        if number:
            self._write(b"%d\n" % number)

    def _beat(self) -> None:
        while not self._ended.wait(orders.HEARTBEAT):
            self._write(b".\n")

    def _write(self, data: bytes) -> None:
        with self._writing:
            if self._child is None or self._child.stdin is None:
                return
            try:
                self._child.stdin.write(data)
                self._child.stdin.flush()
            except OSError:
                pass  # it has ended


def _show(text: bytes) -> None:
    """Write to descriptor 1, whose output Ray shows on the driver."""
    while text:
        text = text[os.write(1, text) :]
