"""The load on the host of the job's store with a thousand supervisors; prints JSON.

    python bench/many_supervisors.py --nodes 64
    python bench/many_supervisors.py --output bench/results/many_supervisors.json

One supervisor is real: node 0, which serves the store. The others are simulated, many in a process: each has the real
coordination and the real policy; only its workers do not exist. See bench/README.md.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import multiprocessing
import os
import resource
import select
import shutil
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any


os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")

from jobs import RALLY, Progress, machine, publish

from rallypoint._core import env as environment
from rallypoint.errors import RallyError
from rallypoint.launch import policy
from rallypoint.launch.command_line import given as command_lines
from rallypoint.launch.command_line.settings import config_from
from rallypoint.launch.config import LaunchConfig
from rallypoint.launch.coordination.interface import (
    CoordinationFailed,
    NodeAsked,
    NodeFacts,
    NotNeeded,
    PeerEvent,
    RoundReady,
)
from rallypoint.launch.coordination.peers import PeerNodes
from rallypoint.launch.output.failure import Raised, WorkerFailure
from rallypoint.launch.policy import Phase
from rallypoint.rendezvous.home import STOPPED


PROCESSES = 8
NODES, WORKERS = 1024, 8
# Seconds for which nothing happens.
IDLE_SECONDS = 20.0
# Seconds for which the logs are followed, while workers write a line each second.
LOG_SECONDS = 20.0
# Bytes per thread: simulated supervisors need little.
STACK = 512 * 1024
SWITCH_INTERVAL = 0.1
PATIENCE = 180.0
MIB = 1 << 20
IN_OWN_NETWORK = "RALLY_BENCH_IN_OWN_NETWORK"

# The one worker of node 0: it runs until it is told to stop.
WORKER = """\
import time
while True:
    print("a line of the first worker", flush=True)
    time.sleep(1)
"""


# -- simulated supervisors ------------------------------------------------------------------------


def failure(node: int, rank: int, generation: int) -> WorkerFailure:
    """The failure of a worker that raised in a training script, with a traceback of 2 KiB."""
    frame = '  File "/home/user/project/train.py", line 88, in step\n    loss.backward()\n'
    return WorkerFailure(
        host=f"node{node}",
        node_rank=node,
        rank=rank,
        local_rank=rank % WORKERS,
        pid=1000 + rank,
        generation=generation,
        exit_code=1,
        signal=None,
        raised=Raised(
            type="RuntimeError",
            message=f"CUDA error: an illegal memory access was encountered (rank {rank})",
            traceback=frame * (2048 // len(frame)),
            at=time.monotonic(),
            timestamp=int(time.time()),
        ),
        native_stack="",
        cause="",
        stderr=("RuntimeError: CUDA error: an illegal memory access was encountered",),
        at=time.monotonic(),
        stopped_by_us=False,
    )


def stacks(first_rank: int) -> list[dict[str, Any]]:
    """The stacks of eight workers in an all-reduce, each with a loader's thread."""
    frames = [
        {"file": f"/usr/lib/python3/site-packages/torch/module_{i}.py", "function": f"forward_{i}", "line": i}
        for i in range(20)
    ]  # fmt: skip
    return [
        {
            "rank": first_rank + i,
            "pid": 1000 + i,
            "name": f"rank {first_rank + i}",
            "why": "",
            "host": "node",
            "threads": [
                {"name": "MainThread", "frames": frames},
                {"name": "loader", "frames": frames[:8]},
            ],
        }
        for i in range(WORKERS)
    ]


class Node:
    """One supervisor without workers: the real coordination and the real policy.

    Args:
        config: the job's.
        number: this node's, for its host's name.
        aside: the pool in which it answers questions, as supervisors do in threads.
    """

    def __init__(self, config: LaunchConfig, number: int, aside: ThreadPoolExecutor) -> None:
        self.number = number
        self.coordination = PeerNodes(config, lambda _: None)
        self.config = config
        self.round: RoundReady | None = None
        self.formed: dict[int, float] = {}  # generation -> when
        self.told: dict[str, float] = {}  # what another node has reported -> when it was first read
        self.answered = 0
        self.error = ""
        self.dead = False
        self.left = False
        self._aside = aside
        self._written = 0
        self._failing = -1  # the generation in which the workers have failed
        self.state = policy.State(
            max_restarts=config.max_restarts,
            grace=config.shutdown_timeout,
            num_nodes=config.num_nodes,
            elastic=config.elastic,
        )

    def start(self) -> None:
        self._do(policy.start(self.state))

    def hear(self) -> None:
        """Handle the coordination's events."""
        for event in self.coordination.take():
            match event:
                case RoundReady():
                    self.round = event
                    self.formed[event.generation] = time.monotonic()
                    self._decide(
                        policy.RoundFormed(
                            event.workers_of_nodes[event.node_rank],
                            event.generation,
                            event.restarts,
                            event.serves,
                            len(event.workers_of_nodes),
                        )
                    )
                case NodeAsked():
                    self._aside.submit(self._answer, event)
                case PeerEvent():
                    self._hear_of_node(event)
                case NotNeeded():
                    self._decide(policy.NotNeeded())
                case CoordinationFailed(error):
                    self.error = self.error or f"{type(error).__name__}: {str(error)[:200]}"
                case _:
                    self.error = self.error or f"node {self.number} was asked to serve the store"

    def fail(self) -> None:
        """One of the workers fails."""
        self._failing = self.state.generation
        self._decide(policy.WorkerEnded(0, failed=True))

    def enter_session(self) -> None:
        """All workers enter a session."""
        for index in range(WORKERS):
            self._decide(policy.SessionEntered(index))

    def be_told_to_stop(self) -> None:
        """The cluster sends SIGTERM, here as on all nodes."""
        self.coordination.tell("told", self.state.generation, ())

    def die(self) -> None:
        """As if the host were gone: its connections close, and nothing is sent."""
        self.dead = True
        handler: Any = self.coordination._rendezvous  # noqa: SLF001
        handler._connection.close(leaving=False)  # noqa: SLF001
        handler._watch.close()  # noqa: SLF001

    def _hear_of_node(self, event: PeerEvent) -> None:
        self.told.setdefault(event.what, time.monotonic())
        if event.what != "reports" and policy.is_past(self.state, event.generation):
            return
        match event.what:
            case "reports":
                self._leave("the job has failed")
            case "told":
                self._decide(policy.SignalReceived(signal.SIGTERM, everywhere=True))
            case "in session":
                self._decide(policy.NodeInSession(event.node_rank, inside=True))
            case "all_done":
                self._decide(policy.PeersDone())
            case "stopped":
                self._decide(policy.PeersStopped(event.node_rank))
            case "failed":
                self._decide(policy.PeerFailed(event.node_rank, event.generation))
            case "lost":
                self._decide(policy.PeerLost(event.node_rank, event.is_own))
            case "leaving":
                self._decide(policy.PeerLeaves(event.node_rank))
            case "waiting":
                self._decide(policy.NodeWaiting())
            case _:
                pass

    def _answer(self, asked: NodeAsked) -> None:
        assert self.round is not None
        first = sum(self.round.workers_of_nodes[: self.round.node_rank])
        body: dict[str, Any] = {"processes": stacks(first), "ended": [], "moving": False}
        if asked.question.get("ask") == "logs":
            body = self._logs(first)
        try:
            self.coordination.answer(asked, body)
            self.answered += 1
        except (RallyError, OSError, ValueError) as error:
            self.error = self.error or f"{type(error).__name__}: {str(error)[:200]}"

    def _logs(self, first: int) -> dict[str, Any]:
        """The logs of a node whose workers each write a line of 100 characters per second to two streams."""
        self._written += 1
        files = [
            {
                "key": f"0/{i}/0/{stream}",
                "rank": first + i,
                "local_rank": i,
                "stream": stream,
                "place": [123456789, self._written * 200],
                "lines": [[time.monotonic(), "x" * 100]] * (2 if stream == "stdout" else 0),
            }
            for i in range(WORKERS)
            for stream in ("stdout", "stderr")
        ]
        return {"host": "node", "now": time.monotonic(), "generation": 0, "files": files}

    def _decide(self, event: policy.Event) -> None:
        self._do(policy.decide(time.monotonic(), self.state, event))

    def _do(self, decision: policy.Decision) -> None:
        """Workers start and end at once."""
        self.state = decision.state
        follows: list[policy.Event] = []
        for command in decision.commands:
            match command:
                case policy.Join():
                    facts = NodeFacts(
                        num_workers=WORKERS,
                        store_addr="127.0.0.1",
                        store_port=1,
                        restarts=self.state.restarts,
                        verdict=self.state.verdict,
                    )
                    self.coordination.join(self.state.generation, facts)
                case policy.SignalWorkers():
                    follows += [policy.WorkerEnded(i, failed=True) for i in self.state.running]
                case policy.Sweep():
                    follows.append(policy.Swept())
                case policy.TellPeers(what):
                    self.coordination.tell(what, self.state.generation, self._failures())
                case policy.Finish(policy.Aim.FAIL):
                    self.coordination.tell("report", self.state.generation, self._failures())
                case policy.Finish():
                    self._leave(STOPPED)
                case _:
                    pass
        for event in follows:
            self._decide(event)

    def _leave(self, ending: str) -> None:
        if self.state.phase is Phase.ENDED and not self.left:
            self.left = True
            self._aside.submit(self.coordination.close, ending)

    def _failures(self) -> tuple[WorkerFailure, ...]:
        """All workers of a node fail together, as after a collective's error."""
        if self.round is None or self._failing != self.state.generation:
            return ()
        first = sum(self.round.workers_of_nodes[: self.round.node_rank])
        generation = self.state.generation
        return tuple(failure(self.round.node_rank, first + i, generation) for i in range(WORKERS))


class Crowd:
    """The supervisors in one process. Receives commands through a pipe, and answers with measurements."""

    def __init__(self, pipe: Connection, words: Sequence[str], numbers: range) -> None:
        self._pipe = pipe
        config, _ = config_from(command_lines.parse(list(words)), environment.snapshot())
        self._aside = ThreadPoolExecutor(8, thread_name_prefix="answers")
        self._nodes = [Node(config, number, self._aside) for number in numbers]
        self._lock = threading.Lock()
        self._ends = False

    def run(self) -> None:
        loop = threading.Thread(target=self._loop, daemon=True)
        self._pipe.send("ready")
        while True:
            match self._pipe.recv():
                case "start":
                    with self._lock:
                        for node in self._nodes:
                            node.start()
                    loop.start()
                    self._pipe.send(None)
                case ("fail", numbers):
                    with self._lock:
                        for node in self._nodes:
                            if numbers is None or node.number in numbers:
                                node.fail()
                    self._pipe.send(None)
                case "enter sessions" | "be told to stop" as what:
                    with self._lock:
                        for node in self._nodes:
                            getattr(node, what.replace(" sessions", "_session").replace(" ", "_"))()
                    self._pipe.send(None)
                case ("die", number):
                    for node in self._nodes:
                        if node.number == number:
                            node.die()
                    self._pipe.send(None)
                case "news":
                    self._pipe.send(self._news())
                case _:
                    return

    def _loop(self) -> None:
        poll = select.epoll()
        nodes = {node.coordination.fileno(): node for node in self._nodes}
        for fd in nodes:
            poll.register(fd, select.EPOLLIN)
        while not self._ends:
            for fd, _ in poll.poll():
                node = nodes[fd]
                if node.dead or node.left:
                    with contextlib.suppress(OSError):  # it is closed
                        poll.unregister(fd)
                    continue
                with self._lock:
                    node.hear()

    def _news(self) -> dict[str, Any]:
        with self._lock:
            alive = [node for node in self._nodes if not node.dead]
            return {
                "formed": [dict(node.formed) for node in alive],
                "told": [dict(node.told) for node in alive],
                "phases": [node.state.phase.value for node in alive],
                "in_session": [len(node.state.in_session) for node in alive],
                "answered": sum(node.answered for node in alive),
                "errors": [node.error for node in alive if node.error][:3],
            }


def crowd(pipe: Connection, words: Sequence[str], numbers: range, env: dict[str, str]) -> None:
    raise_limits()
    os.environ.update(env)
    threading.stack_size(STACK)
    sys.setswitchinterval(SWITCH_INTERVAL)
    gc.collect()
    gc.freeze()
    with contextlib.suppress(EOFError, OSError):
        Crowd(pipe, words, numbers).run()
    os._exit(0)  # do not wait for thousands of threads


def raise_limits() -> None:
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


# -- the host of the store ------------------------------------------------------------------------


@dataclass(slots=True)
class Use:
    """What a process has used: CPU in seconds, memory in MiB, descriptors."""

    cpu: float
    rss: float
    most_rss: float
    files: int

    @classmethod
    def of(cls, pid: int) -> Use:
        folder = Path(f"/proc/{pid}")
        fields = (folder / "stat").read_text().rpartition(")")[2].split()
        status = dict(
            line.split(":", 1)
            for line in (folder / "status").read_text().splitlines()
            if ":" in line
        )
        return cls(
            cpu=(int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK"),
            rss=int(status["VmRSS"].split()[0]) / 1024,
            most_rss=int(status["VmHWM"].split()[0]) / 1024,
            files=len(os.listdir(folder / "fd")),
        )


def sent() -> int:
    """Bytes over the loopback interface so far. Here, all of them go to or come from the store."""
    for line in Path("/proc/net/dev").read_text().splitlines():
        name, _, figures = line.partition(":")
        if name.strip() == "lo":
            return int(figures.split()[0])
    return 0


@dataclass
class Host:
    """Node 0: a real supervisor, and the process that serves the store."""

    supervisor: int
    store: int
    phases: dict[str, dict[str, Any]] = field(default_factory=dict)

    @contextlib.contextmanager
    def measured(self, name: str) -> Iterator[dict[str, Any]]:
        """What the host spends on a phase."""
        before, bytes_before, began = self._uses(), sent(), time.monotonic()
        figures: dict[str, Any] = {}
        yield figures
        took = time.monotonic() - began
        after = self._uses()
        figures["took_s"] = round(took, 3)
        figures["mib"] = round((sent() - bytes_before) / MIB, 2)
        figures["mib_per_s"] = round((sent() - bytes_before) / MIB / took, 3)
        for who, use in after.items():
            spent = use.cpu - before[who].cpu
            figures[who] = {
                "cpu_s": round(spent, 2),
                "cpu_percent": round(100 * spent / took, 1),
                "rss_mib": round(use.rss, 1),
                "most_rss_mib": round(use.most_rss, 1),
                "descriptors": use.files,
            }
        self.phases[name] = figures

    def _uses(self) -> dict[str, Use]:
        found = {}
        for who, pid in (("store", self.store), ("supervisor", self.supervisor)):
            with contextlib.suppress(OSError):  # it has ended
                found[who] = Use.of(pid)
        return found


def served_by(port: int, supervisor: subprocess.Popen[bytes], said: Path) -> int:
    """The process that listens on a port."""
    import psutil

    deadline = time.monotonic() + 60.0
    while time.monotonic() < deadline and supervisor.poll() is None:
        for each in psutil.net_connections("tcp"):
            listens = each.laddr.port == port and each.status == psutil.CONN_LISTEN
            # The supervisor also holds the socket until the other process serves it.
            if listens and each.pid and each.pid != supervisor.pid:
                return int(each.pid)
        time.sleep(0.1)
    raise TimeoutError(f"nobody listens at port {port}: {said.read_text()}")


# -- the phases -----------------------------------------------------------------------------------


class Nodes:
    """The simulated nodes of all processes."""

    def __init__(self, pipes: Sequence[Connection]) -> None:
        self._pipes = pipes

    def tell(self, command: Any) -> None:
        for pipe in self._pipes:
            pipe.send(command)
        for pipe in self._pipes:
            _receive(pipe)

    def news(self) -> dict[str, Any]:
        """The news of all nodes; see :meth:`Crowd._news`."""
        for pipe in self._pipes:
            pipe.send("news")
        answers = [_receive(pipe) for pipe in self._pipes]
        merged: dict[str, Any] = {
            name: [each for answer in answers for each in answer[name]]
            for name in ("formed", "told", "phases", "errors", "in_session")
        }
        merged["answered"] = sum(answer["answered"] for answer in answers)
        return merged

    def wait(self, what: str, holds: Callable[[dict[str, Any]], bool]) -> dict[str, Any]:
        """The news once ``holds`` is true of it. Raises TimeoutError."""
        deadline = time.monotonic() + PATIENCE
        while not holds(news := self.news()):
            if time.monotonic() > deadline:
                counts = {each: news["phases"].count(each) for each in set(news["phases"])}
                raise TimeoutError(f"{what}: not after {PATIENCE:g} s; {counts} {news['errors']}")
            time.sleep(0.2)
        return news

    def await_generation(self, generation: int) -> float:
        """When the last node was in that generation."""
        news = self.wait(
            f"generation {generation}",
            lambda news: all(generation in each for each in news["formed"]),
        )
        return max(each[generation] for each in news["formed"])


def _receive(pipe: Connection) -> Any:
    if not pipe.poll(PATIENCE):
        raise TimeoutError("a process of the benchmark does not answer")
    return pipe.recv()


def meet(nodes: Nodes, host: Host, progress: Progress) -> None:
    """The first round."""
    progress.step("the nodes meet")
    with host.measured("meeting") as figures:
        began = time.monotonic()
        nodes.tell("start")
        figures["last_node_s"] = round(nodes.await_generation(0) - began, 3)


def stop(nodes: Nodes, host: Host, progress: Progress, count: int) -> None:
    """All workers are in sessions, and the cluster stops the job."""
    meet(nodes, host, progress)
    progress.step("all workers enter sessions")
    with host.measured("sessions") as figures:
        began = time.monotonic()
        nodes.tell("enter sessions")
        nodes.wait("sessions", lambda news: min(news["in_session"]) == count - 1)
        figures["all_know_s"] = round(time.monotonic() - began, 3)

    progress.step("all nodes are told to stop")
    with host.measured("stop") as figures:
        began = time.monotonic()
        os.kill(host.supervisor, signal.SIGTERM)
        nodes.tell("be told to stop")
        news = nodes.wait("stop", lambda news: all("told" in each for each in news["told"]))
        heard = [each["told"] - began for each in news["told"]]
        figures["heard_median_s"] = round(statistics.median(heard), 3)
        figures["heard_last_s"] = round(max(heard), 3)
        nodes.wait("end", lambda news: set(news["phases"]) == {"ended"})
        figures["all_ended_s"] = round(time.monotonic() - began, 3)


def fail(nodes: Nodes, host: Host, job: str, stderr: Path, progress: Progress, count: int) -> None:
    """The nodes are idle, answer questions, see failures and a loss; then the job fails."""
    meet(nodes, host, progress)

    progress.step(f"nobody does anything for {IDLE_SECONDS:g} s")
    time.sleep(2.0)
    with host.measured("idle"):
        time.sleep(IDLE_SECONDS)

    progress.step("rally stacks")
    with host.measured("stacks") as figures:
        figures |= _command("stacks", job)
        figures["answered"] = nodes.news()["answered"]

    progress.step(f"rally logs -f for {LOG_SECONDS:g} s")
    with host.measured("logs") as figures:
        figures |= _follow(job)

    progress.step("one worker fails")
    with host.measured("one failure") as figures:
        figures |= _failure(nodes, {count - 1}, generation=1)

    progress.step("all workers of all nodes fail at once")
    with host.measured("all fail") as figures:
        figures |= _failure(nodes, None, generation=2)

    progress.step("a node is lost")
    with host.measured("loss") as figures:
        began = time.monotonic()
        nodes.tell(("die", count - 1))
        figures["last_node_s"] = round(nodes.await_generation(3) - began, 3)
        heard = [each["lost"] - began for each in nodes.news()["told"] if "lost" in each]
        figures["heard_median_s"] = round(statistics.median(heard), 3)
        figures["heard_last_s"] = round(max(heard), 3)

    progress.step("all fail again, and the job with them")
    with host.measured("end") as figures:
        began = time.monotonic()
        nodes.tell(("fail", None))
        with contextlib.suppress(ChildProcessError):
            os.waitpid(host.supervisor, 0)
        figures["exit_s"] = round(time.monotonic() - began, 3)
    told = stderr.read_text(errors="replace")
    host.phases["end"]["lines_told"] = told.count("\n")
    host.phases["end"]["characters_told"] = len(told)


def _failure(nodes: Nodes, numbers: set[int] | None, generation: int) -> dict[str, Any]:
    began = time.monotonic()
    nodes.tell(("fail", numbers))
    last = nodes.await_generation(generation) - began
    heard = [each["failed"] - began for each in nodes.news()["told"] if "failed" in each]
    figures: dict[str, Any] = {"last_node_s": round(last, 3)}
    if numbers is not None and heard:  # not later ones: each node records only its first
        figures["heard_median_s"] = round(statistics.median(heard), 3)
        figures["heard_last_s"] = round(max(heard), 3)
    return figures


def _command(*words: str) -> dict[str, Any]:
    began = time.monotonic()
    done = subprocess.run([RALLY[0], *words], capture_output=True, text=True, timeout=PATIENCE)
    figures: dict[str, Any] = {"command_s": round(time.monotonic() - began, 3)}
    figures["exit_code"] = done.returncode
    figures["lines"] = done.stdout.count("\n")
    if done.stderr:
        figures["said"] = done.stderr[-300:]
    return figures


def _follow(job: str) -> dict[str, Any]:
    with tempfile.TemporaryFile() as output, tempfile.TemporaryFile() as errors:
        command = [RALLY[0], "logs", "-f", job]
        with subprocess.Popen(command, stdout=output, stderr=errors) as process:
            time.sleep(LOG_SECONDS)
            used = Use.of(process.pid)
            process.send_signal(signal.SIGINT)
            process.wait(30)
        output.seek(0)
        errors.seek(0)
        figures = {
            "lines": output.read().count(b"\n"),
            "command_cpu_s": round(used.cpu, 2),
            "command_rss_mib": round(used.most_rss, 1),
        }
        if said := errors.read():
            figures["said"] = said[-300:].decode(errors="replace")
        return figures


# -- all together ---------------------------------------------------------------------------------


def measure(count: int, folder: Path, progress: Progress, *, fails: bool) -> dict[str, Any]:
    """One job of ``count`` nodes, which fails or is stopped."""
    port = _free_port()
    script = folder / "train.py"
    script.write_text(WORKER)
    secret = folder / "secret"
    secret.write_bytes(os.urandom(32).hex().encode())
    secret.chmod(0o600)
    common = ["--nnodes", f"{count - 1}:{count}", "--rdzv-endpoint", f"127.0.0.1:{port}"]
    common += ["--rdzv-id", f"many-{port}", "--max-restarts", "2"]
    common += ["--secret-file", str(secret)]
    own = ["--nproc-per-node", "1", "--log-dir", str(folder / "logs"), "--redirects", "3"]
    own += ["--log-format", "json"]
    env = dict(os.environ)
    if not fails:
        # Otherwise a node whose workers cannot save does not ask whether all were told to stop.
        own += ["--requeue-on", "143"]
        for name in ("squeue", "scontrol"):
            (folder / name).symlink_to(shutil.which("false") or "/bin/false")
        env |= {"SLURM_JOB_ID": "1", "PATH": f"{folder}:{env['PATH']}"}
    theirs = [*common, "--nproc-per-node", str(WORKERS), "--rdzv-conf", "is_host=0", str(script)]
    what = "fails" if fails else "stops"
    progress.step(f"processes begin, of the job that {what}")
    with contextlib.ExitStack() as stack:
        said = folder / "stderr"
        stderr = stack.enter_context(said.open("wb"))
        words = [*RALLY, *common, *own, str(script)]
        supervisor = subprocess.Popen(words, stderr=stderr, env=env)
        stack.callback(_end, supervisor)
        pipes = []
        numbers = range(1, count)
        for i in range(PROCESSES):
            ours, its = processes.Pipe()
            each = processes.Process(
                target=crowd, args=(its, theirs, numbers[i::PROCESSES], {}), daemon=True
            )
            each.start()
            its.close()
            stack.callback(each.kill)
            pipes.append(ours)
        for pipe in pipes:
            _receive(pipe)
        host = Host(supervisor.pid, served_by(port, supervisor, said))
        nodes = Nodes(pipes)
        if fails:
            fail(nodes, host, str(supervisor.pid), said, progress, count)
        else:
            stop(nodes, host, progress, count)
    return host.phases


processes = multiprocessing.get_context("forkserver")


def _end(process: subprocess.Popen[bytes]) -> None:
    if process.poll() is None:
        process.terminate()
        try:
            process.wait(20)
        except subprocess.TimeoutExpired:
            process.kill()


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as held:
        return int(held.getsockname()[1])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--nodes", type=int, default=NODES, help="how many nodes (default 1024)")
    parser.add_argument("--output", type=Path, help="also write the JSON to this file")
    args = parser.parse_args()
    own_network = enter_own_network()
    raise_limits()
    processes.set_forkserver_preload(["torch", "rallypoint.launch.coordination.peers"])
    progress = Progress(13)
    jobs = {}
    for fails in (True, False):
        with tempfile.TemporaryDirectory(prefix="rally-many-") as folder:
            what = "a job that fails" if fails else "a job that is stopped"
            jobs[what] = measure(args.nodes, Path(folder), progress, fails=fails)
    progress.close()
    result: dict[str, Any] = {
        "benchmark": "many_supervisors",
        "machine": machine(),
        "nodes": args.nodes,
        "workers_per_node": WORKERS,
        "own_network": own_network,
        "jobs": jobs,
    }
    publish(result, args.output)
    return 0


def enter_own_network() -> bool:
    """Whether no one else uses the loopback interface. As root, this program runs again, in its own namespace."""
    if os.environ.get(IN_OWN_NETWORK):
        subprocess.run(["ip", "link", "set", "lo", "up"], check=True)
        return True
    if os.geteuid() == 0 and shutil.which("unshare") and shutil.which("ip"):
        os.environ[IN_OWN_NETWORK] = "1"
        os.execvp("unshare", ["unshare", "--net", sys.executable, *sys.argv])
    return False


if __name__ == "__main__":
    sys.exit(main())
