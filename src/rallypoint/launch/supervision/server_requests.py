"""What a supervisor asks of its fork server, even if that is stopped or hangs in the kernel."""

from __future__ import annotations

from collections.abc import Callable

from rallypoint._core import process
from rallypoint.launch.output import oom
from rallypoint.launch.policy import Aim, Phase
from rallypoint.launch.server.channel import Message
from rallypoint.launch.server.server_process import ServerProcess

from .event_loop import EventLoop
from .situation import Situation


# How long the fork server may take to end all processes.
SERVER_PATIENCE = 8.0


class ServerRequests:
    """Sends requests to the fork server, and executes them here if it does not confirm them.

    Args:
        server: the fork server.
        loop: where it is watched.
        now: this node's situation.
        say: prints a line for the user.
        on_gone: called when the fork server is gone, with the reason and the processes that could not be ended.
        on_swept: called when all processes have ended, except for those that it is given.
    """

    def __init__(
        self,
        server: ServerProcess,
        loop: EventLoop,
        now: Situation,
        say: Callable[[str], None],
        *,
        on_gone: Callable[[str, list[int]], None],
        on_swept: Callable[[list[int]], None],
    ) -> None:
        self._server = server
        self._loop = loop
        self._now = now
        self._say = say
        self._on_gone = on_gone
        self._on_swept = on_swept
        self._oom_before = oom.read_counters()
        self._left: set[int] = set()  # pids that survived SIGKILL and were reported
        self.is_deaf = False  # the fork server does not confirm requests

    def ask(self, message: Message) -> None:
        """Send the fork server a request, or execute it here if the fork server is deaf."""
        if self.is_deaf:
            self._execute(message)
        else:
            self._server.ask(message)

    def note_confirmed(self, number: int) -> None:
        """The fork server has confirmed a request."""
        self._server.confirmed(number)
        self.is_deaf = False

    def check_line(self) -> None:
        """A worker seems to have ended. See whether the fork server can report that."""
        if not self.is_deaf:
            self._server.ask({"do": "ping"})

    def execute_unconfirmed(self) -> None:
        """Execute the requests that the fork server should have confirmed by now."""
        for message in self._server.unheard():
            self._execute(message)

    def note_end(self, *, is_ready: bool) -> None:
        """The fork server's pidfd is ready: see whether it is gone."""
        if self._server.wait(0):
            reason = f"its fork server (pid {self._server.pid}) {self._server.how_it_ended()}"
            if self._server.was_killed():
                why = oom.explain(self._oom_before, oom.read_counters())
                reason += f"; {why}" if why else ""
            elif not is_ready:
                reason += self._server.why_imports_fail()
            self._let_go()
            self._on_gone(reason, self._server.kill_orphans())

    def end(self, *, is_ready: bool) -> None:
        """End the fork server with all its processes."""
        # A fork server that is still importing has nothing to end, and a deaf one does nothing. Neither is waited for.
        answers = is_ready and not self.is_deaf
        self.tell_what_is_left(self._server.end(SERVER_PATIENCE if answers else 0.0))

    def tell_what_is_left(self, left: list[int]) -> None:
        """Tell people, once, which processes could not be ended."""
        news = sorted(set(left) - self._left)
        self._left.update(news)
        if news:
            self._say(
                f"processes {news} survived SIGKILL (stuck in the kernel, or frozen?) and are left running"
            )

    def _let_go(self) -> None:
        for fd in (self._server.pidfd, self._server.channel.fileno()):
            self._loop.forget(fd)
        self._server.channel.closed_by_peer = True

    def _execute(self, message: Message) -> None:
        """Execute a request that the fork server does not confirm: it is stopped, or hangs in the kernel."""
        server, state, workers = self._server, self._now.state, self._now.workers
        what = f"fork server (pid {server.pid}) does not answer ({server.why_silent()})"
        match message["do"]:
            case "signal":
                self.is_deaf = True
                pids = [each.pid for each in workers if each.name in message["names"]]
                server.signal_children(pids, message["signal"], group=message["group"])
            case "wake":
                process.wake(each.pid for each in workers if each.name in message["names"])
            case "sweep" if state.phase is Phase.SWEEPING:
                self.is_deaf = True
                self._say(f"the {what}; ending its processes directly")
                self._let_go()
                left = server.kill()
                if state.aim is Aim.RESTART:
                    self._on_gone(f"its {what}", left)
                else:
                    self._on_swept(left)
            case "ping" if state.phase in {Phase.RUNNING, Phase.LISTENING}:
                ended = [each for each in workers if each.pid and each.status is None]
                if any(not process.is_running(each.pid) for each in ended):
                    self.is_deaf = True
                    self._let_go()
                    self._on_gone(f"its {what}", server.kill())
            case _:
                pass  # no longer needed
