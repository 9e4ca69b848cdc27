"""``RallyTrainer``: a job of ``rally run`` on a Ray cluster.

The driver requests a placement group and starts an actor in each bundle; the actor runs a supervisor. The supervisors meet
at a store that the driver serves, so any of them may be lost. Ray places a lost bundle again as soon as it can. The
driver then starts an actor there, and its supervisor joins the running job.
"""

from __future__ import annotations

import logging
import os
import signal
import uuid
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Self

import ray
from ray.exceptions import RayActorError
from ray.util.placement_group import placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from rallypoint._core import env as environment, secret
from rallypoint._core.clock import Deadline
from rallypoint.errors import ConfigError, LaunchError, WorkersFailed
from rallypoint.launch import host_functions
from rallypoint.launch.command_line import given as command_lines
from rallypoint.launch.command_line.given import Given, resolve
from rallypoint.launch.command_line.values import Values, shutdown_timeout
from rallypoint.launch.hosts import orders
from rallypoint.launch.hosts.call_files import Answer
from rallypoint.launch.hosts.orders import Orders
from rallypoint.launch.multiprocess_config import MultiprocessConfig
from rallypoint.launch.output.report import FailureReport
from rallypoint.launch.worker import payload

from .job_metrics import JobMetrics
from .job_store import JobStore
from .node_actor import NodeActor
from .roster import Roster
from .sizes import Meeting, Sizes, sizes_from, words_of


_log = logging.getLogger(__name__)

# How long the nodes may take to stop once told to, beyond --shutdown-timeout.
_ENDING = 10.0
_MAX_LOSSES = 100


class RallyTrainer:
    """A job on the nodes of a Ray cluster.

    Args:
        target: a script and its arguments (``"train.py"``, ``["train.py", "--epochs", "3"]``), or a function. As with
            ``launch_subprocesses``, the function is called on each worker inside a process group.
        args: the function's arguments.
        kwargs: the function's keyword arguments.
        num_nodes: how many bundles. With ``(MIN, MAX)``, the job continues with as few as MIN.
        workers_per_node: default: one for each GPU of a bundle, or one if it has none.
        resources_per_node: a bundle's, ``{"CPU": 8, "GPU": 4}``; ``memory`` is in bytes. Default: a CPU for each worker.
        strategy: how Ray places the bundles; by default each on its own machine.
        flags: flags of ``rally run``, such as ``["--max-restarts", "3"]``.
        config: backends and parallelism for a function; its sizes are set here.
        setup: called in each worker before the process group is formed.
        max_losses: how many losses of bundles the job survives in all.
        placement_timeout: seconds to wait until the cluster has room for all bundles; None: without limit.

    Raises:
        ConfigError: an argument cannot work.
    """

    def __init__(
        self,
        target: str | Sequence[str] | Callable[..., Any],
        *,
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
        num_nodes: int | tuple[int, int] = 1,
        workers_per_node: int | None = None,
        resources_per_node: Mapping[str, float] | None = None,
        strategy: str = "STRICT_SPREAD",
        flags: Sequence[str] = (),
        config: MultiprocessConfig | None = None,
        setup: Callable[[], object] | None = None,
        max_losses: int = _MAX_LOSSES,
        placement_timeout: float | None = None,
    ) -> None:
        self._sizes = sizes_from(num_nodes, workers_per_node, resources_per_node, strategy)
        self._max_losses = max_losses
        self._placement_timeout = placement_timeout
        given = command_lines.parse(flags)
        if given.target:
            raise ConfigError("flags", given.target[0], "not a flag of rally run")
        self._call: payload.Call | None = None
        self._config = config or MultiprocessConfig()
        if callable(target):
            self._call = payload.Call(target, tuple(args), dict(kwargs or {}), setup)
            words: tuple[str, ...] = (payload.name_of(target),)
        else:
            words = (target,) if isinstance(target, str) else tuple(target)
            if args or kwargs or setup or config:
                problem = "args, kwargs, setup and config are for functions"
                raise ConfigError("target", words, problem, 'target=["train.py", "--epochs", "3"]')
        if not words:
            raise ConfigError("target", None, "expected a script or a function")
        self._given = Given(given.values, words)
        words_of(self._given, self._sizes, None, {})  # raises if a flag cannot be used here
        env = environment.snapshot()
        # Workers may need all of this time to save.
        self._ending = _ENDING + shutdown_timeout(Values(*resolve(self._given, env), env))

    def fit(self) -> Any:
        """Run the job.

        Blocks: until the job and all its processes have ended.
        Returns:
            What the function returned on rank 0; None for a script.
        Raises:
            WorkersFailed: the job failed; the text is the report.
            LaunchError: it could not be run, or bundles were lost too often.
        """
        parts = self._run()
        if self._call is None:
            return None
        first = [each.results[0] for each in parts if each.results and each.first_rank == 0]
        return payload.unpack_result(0, first[0]) if first else None

    def fit_all(self) -> list[Any]:
        """Run the job of a function.

        Blocks: until the job and all its processes have ended.
        Returns:
            What the function returned, by rank.
        Raises:
            ConfigError: the target is a script.
            WorkersFailed: the job failed, or a worker's result is missing; the text is the report.
            LaunchError: it could not be run, or bundles were lost too often.
        """
        if self._call is None:
            raise ConfigError("target", self._given.target, "a script returns nothing", "use fit")
        parts = sorted(self._run(), key=lambda each: each.first_rank)
        return host_functions.unpacked([data for each in parts for data in each.results])

    def _run(self) -> list[Answer]:
        """Run the job. Returns its nodes' answers if it succeeds."""
        if not ray.is_initialized():
            ray.init()
        roster = Roster(self._sizes.most, self._max_losses)
        metrics = JobMetrics(self._given.target[0], roster)
        with _Job(self._sizes, roster, self._ending, metrics) as job:
            job.place(self._placement_timeout)
            call, more = b"", {}
            if self._call is not None:
                call = host_functions.packed(self._config, self._call).data
                more = {"--preload": ",".join(host_functions.PRELOAD)}
            shared = secret.shared(environment.snapshot()) or secret.make().hex().encode()
            words = words_of(self._given, self._sizes, job.meet(shared), more)
            job.start(_orders(words, shared, len(call)), call)
            job.watch()
            return _answers_of(job)


def _orders(words: tuple[str, ...], shared: bytes, call_size: int) -> Orders:
    # With Ray's working_dir, each actor runs in its own copy of the folder.
    copied = "working_dir" in ray.get_runtime_context().runtime_env
    return Orders(
        folder="" if copied else os.getcwd(),
        env=orders.forwarded(environment.snapshot(), ()),
        words=words,
        secret=shared.decode("utf-8", "surrogateescape"),
        token=uuid.uuid4().hex,
        call_size=call_size,
        answers=True,
    )


class _Job:
    """The placement group, the store and the actors of one job."""

    def __init__(self, sizes: Sizes, roster: Roster, ending: float, metrics: JobMetrics) -> None:
        self._sizes = sizes
        self._ending = ending
        self._metrics = metrics
        self.roster = roster
        self.answers: list[Answer] = []
        self._group: Any = None
        self._store: JobStore | None = None
        self._actors: dict[int, Any] = {}
        self._orders: tuple[bytes, Any] = (b"", None)
        # What each awaited reference belongs to: the bundle, and whether it is the end (or the start) of its node.
        self._waiting: dict[Any, tuple[int, bool]] = {}

    def __enter__(self) -> Self:
        return self

    def place(self, timeout: float | None) -> None:
        """Wait until all bundles have been placed."""
        sizes = self._sizes
        bundles = [dict(sizes.bundle) for _ in range(sizes.most)]
        self._group = placement_group(bundles, strategy=sizes.strategy)
        done, _ = ray.wait([self._group.ready()], timeout=timeout)
        if not done:
            raise LaunchError(
                f"the Ray cluster has no room for {sizes.most} bundles of {dict(sizes.bundle)}"
                f" ({sizes.strategy}) within {timeout:g} s; `ray status` shows what is free"
            )

    def meet(self, shared: bytes) -> Meeting | None:
        """Serve the store at which several nodes meet."""
        sizes = self._sizes
        if sizes.most == 1:
            return None
        run_id = f"ray-{uuid.uuid4().hex[:8]}"
        host = str(ray.util.get_node_ip_address())
        self._store = JobStore(host, run_id, sizes.nodes, shared)
        return Meeting(run_id=run_id, host=host, port=self._store.port)

    def start(self, told: Orders, call: bytes) -> None:
        self._orders = (told.to_line(), ray.put(call))
        for index in range(self._sizes.most):
            self._ask(index)

    def _ask(self, index: int) -> None:
        bundle = dict(self._sizes.bundle)
        actor = (
            ray.remote(NodeActor)
            .options(
                num_cpus=bundle.pop("CPU", 0),
                num_gpus=bundle.pop("GPU", 0),
                memory=bundle.pop("memory", None),
                resources=bundle,
                max_concurrency=3,
                scheduling_strategy=PlacementGroupSchedulingStrategy(
                    self._group, placement_group_bundle_index=index
                ),
            )
            .remote()
        )
        self._actors[index] = actor
        self._waiting[actor.place.remote()] = (index, False)
        self._waiting[actor.run.remote(*self._orders)] = (index, True)

    def watch(self) -> None:
        """Follow the nodes until the job has ended."""
        while not self.roster.done:
            done, _ = ray.wait(list(self._waiting), num_returns=1, timeout=None)
            for each in done:
                self._hear(each)
            self._metrics.update()

    def _hear(self, reference: Any) -> None:
        index, is_end = self._waiting.pop(reference)
        try:
            value = ray.get(reference)
        except RayActorError as error:
            if is_end:
                self._lose(index, error)
            return
        if is_end:
            answer = Answer.from_bytes(value.answer) if value.answer else Answer()
            self.answers.append(answer)
            blamed = answer.report is not None and answer.report["root_cause"] is not None
            self.roster.end(index, value.exit_code, worker_failed=blamed)
        else:
            self.roster.start(index)

    def _lose(self, index: int, error: Exception) -> None:
        again = self.roster.lose(index)
        ray.kill(self._actors[index])  # it may be alive and only unreachable from here
        why = " ".join(str(error).split())[:200]
        if self.roster.too_many_losses:
            self._stop(signal.SIGTERM)
            raise LaunchError(f"bundles were lost {self.roster.losses} times; the last one: {why}")
        _log.warning("bundle %d is lost%s: %s", index, ", asking again" if again else "", why)
        if again:
            self._ask(index)

    def _stop(self, number: int) -> None:
        """Tell the running nodes to stop, and wait for them."""
        running = set(self.roster.running)
        for index in running:
            self._actors[index].signal.remote(number)
        left = [each for each, (at, end) in self._waiting.items() if end and at in running]
        deadline = Deadline(self._ending)
        while left and not deadline.expired():
            _done, left = ray.wait(left, timeout=deadline.remaining())

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        try:
            if kind is not None:
                self._stop(signal.SIGINT if kind is KeyboardInterrupt else signal.SIGTERM)
        finally:
            for actor in self._actors.values():
                ray.kill(actor)
            if self._group is not None:
                remove_placement_group(self._group)
            if self._store is not None:
                self._store.close()


def _answers_of(job: _Job) -> list[Answer]:
    if job.roster.exit_code:
        reports = [each.report for each in job.answers if each.report is not None]
        if not reports:
            code = job.roster.exit_code
            raise LaunchError(f"the job failed (exit code {code}); its output above says why")
        blaming = [each for each in reports if each["root_cause"] is not None]
        raise WorkersFailed(FailureReport.from_json((blaming or reports)[0]))
    return job.answers
