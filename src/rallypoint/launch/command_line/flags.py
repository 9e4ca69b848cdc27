"""The flags of ``rally run``: one table, from which command lines are parsed (:mod:`.given`) and ``--help`` is made (:mod:`.flag_help`).

The names, meanings and defaults are torchrun 2.13's, so that a command line carries over; flags that only we have are
marked. Each of torchrun's flags may be written ``--a-b`` or ``--a_b`` and, with a few exceptions, takes its default
from ``PET_A_B``.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from rallypoint.rendezvous.defaults import MASTER_PORT, RENDEZVOUS_PORT


@dataclass(frozen=True, kw_only=True, slots=True)
class Flag:
    """One flag.

    Args:
        name: with dashes: ``--nproc-per-node``.
        short: one-letter form, or "".
        metavar: name of its value in help; "" for a switch.
        default: None where "not given" has a meaning of its own.
        env: whether ``PET_…`` gives its default.
        group: heading in help.
        help: one or two sentences.
        choices: the values allowed, if they are few.
        own: torchrun does not have it.
    """

    name: str
    help: str
    group: str
    short: str = ""
    metavar: str = ""
    default: str | None = None
    env: bool = True
    choices: tuple[str, ...] = ()
    own: bool = False

    @property
    def dest(self) -> str:
        return self.name.lstrip("-").replace("-", "_")

    @property
    def variable(self) -> str:
        return f"PET_{self.dest.upper()}"

    @property
    def is_switch(self) -> bool:
        return not self.metavar


_SIZE, _RESTART, _LOGS = "size of the job", "failure and restart", "output and logs"
_NODES, _START, OTHER = "several nodes", "how workers start", "accepted for torchrun command lines"

FLAGS: tuple[Flag, ...] = (
    Flag(
        name="--nproc-per-node",
        metavar="N",
        default="1",
        group=_SIZE,
        help="workers on this machine: a number, auto (one per accelerator, or per CPU if there is"
        " none), gpu, cpu, xpu",
    ),
    Flag(
        name="--nnodes",
        metavar="N|MIN:MAX",
        default="1:1",
        group=_SIZE,
        help="number of nodes; with MIN:MAX nodes may come and go while the job runs",
    ),
    Flag(
        name="--standalone",
        group=_SIZE,
        help="run on this machine alone; other flags about nodes have no effect",
    ),
    Flag(
        name="--max-restarts",
        metavar="K",
        default="0",
        group=_RESTART,
        help="start all workers again after a failure, at most K times",
    ),
    Flag(
        name="--restart-window",
        own=True,
        metavar="S",
        default="0",
        env=False,
        group=_RESTART,
        help="seconds after which a restart no longer counts against --max-restarts (0: it always does)",
    ),
    Flag(
        name="--max-losses",
        own=True,
        metavar="K",
        default="10",
        env=False,
        group=_RESTART,
        help="in a session of rallypoint.elastic, replace at most K lost workers within --loss-window, while the others"
        " keep what they have; beyond that, a loss is a failure (0: always)",
    ),
    Flag(
        name="--loss-window",
        own=True,
        metavar="S",
        default="600",
        env=False,
        group=_RESTART,
        help="seconds after which a loss no longer counts",
    ),
    Flag(
        name="--requeue-on",
        own=True,
        metavar="RC,…",
        env=False,
        group=_RESTART,
        help="have Slurm start the job again if it ends with one of these exit codes: 143 after an early signal"
        " (sbatch --signal=TERM@300), or one of the script's own",
    ),
    Flag(
        name="--avoid-hosts",
        own=True,
        metavar="FILE",
        env=False,
        group=_RESTART,
        help="file of hosts, one per line, that --hosts, elastic jobs and rally submit slurm leave out. rally adds hosts that were"
        " lost or failed (killed, memory, disk, GPU); these are left out once they have two lines",
    ),
    Flag(
        name="--spares",
        own=True,
        metavar="N",
        default="0",
        env=False,
        group=_RESTART,
        help="processes per node that run the script up to its session of rallypoint.elastic, and wait there to take over"
        " the rank of a lost worker at once",
    ),
    Flag(
        name="--step-timeout",
        own=True,
        metavar="S",
        default="0",
        env=False,
        group=_RESTART,
        help="in a session of rallypoint.elastic, kill and replace a worker that has begun no collective for S seconds"
        " while the others wait for it (0: never)",
    ),
    Flag(
        name="--hang-after",
        own=True,
        metavar="S",
        default="60",
        env=False,
        group=_RESTART,
        help="if no worker has done anything for S seconds and some wait for others, print where each of them is"
        " (0: never); by default also at least ten of the steps that the script reports, up to ten minutes",
    ),
    Flag(
        name="--on-hang",
        own=True,
        metavar="WHAT",
        default="tell",
        choices=("tell", "restart", "fail"),
        env=False,
        group=_RESTART,
        help="what to do about a hang: only tell; restart all workers, which counts as a failure (--max-restarts); or fail."
        " Must be the same on every node",
    ),
    Flag(
        name="--stacks-on-hang",
        own=True,
        env=False,
        group=_RESTART,
        help="show where every worker is when the job hangs (the default)",
    ),
    Flag(
        name="--no-stacks-on-hang",
        own=True,
        env=False,
        group=_RESTART,
        help="only say which ranks are missing; rally stacks and Ctrl-\\ show where the workers are",
    ),
    Flag(
        name="--slow-after",
        own=True,
        metavar="S",
        default="60",
        env=False,
        group=_RESTART,
        help="if the others have waited for a rank for S seconds, in more than a tenth of each step, name it and print what is"
        " different about it (0: never)",
    ),
    Flag(
        name="--shutdown-timeout",
        metavar="S",
        group=_RESTART,
        help="seconds between SIGTERM and SIGKILL when workers are stopped (default 30, or"
        " TORCH_ELASTIC_SHUTDOWN_TIMEOUT)",
    ),
    Flag(
        name="--cause-timeout",
        own=True,
        metavar="S",
        default="5",
        env=False,
        group=_RESTART,
        help="if workers failed only because a peer is gone, seconds to wait for the worker that caused it,"
        " which may still be cleaning up, before the rest get SIGTERM",
    ),
    Flag(
        name="--signals-to-handle",
        metavar="LIST",
        default="SIGTERM,SIGINT,SIGHUP,SIGQUIT",
        group=_RESTART,
        help="signals that are forwarded to the workers and end the job; SIGTERM, SIGINT and SIGHUP always do so."
        " SIGQUIT (Ctrl-\\) does so only if you name it here; otherwise it shows the workers' stacks",
    ),
    Flag(
        name="--signals-to-pass",
        own=True,
        metavar="LIST",
        default="",
        env=False,
        group=_RESTART,
        help="signals that are forwarded to the workers while the job continues: USR1,USR2",
    ),
    Flag(
        name="--log-dir",
        metavar="DIR",
        group=_LOGS,
        help="folder for logs and failure reports; each run adds a folder of its own",
    ),
    Flag(
        name="--redirects",
        short="-r",
        metavar="S",
        default="0",
        group=_LOGS,
        help="streams that go to files instead: 1 stdout, 2 stderr, 3 both, or per local rank:"
        " 0:3,11:1",
    ),
    Flag(
        name="--tee",
        short="-t",
        metavar="S",
        default="0",
        group=_LOGS,
        help="streams that go to files and, with a prefix, to the console; values as --redirects",
    ),
    Flag(
        name="--local-ranks-filter",
        metavar="LIST",
        default="",
        group=_LOGS,
        help="show only these local ranks on the console: 0,1,10",
    ),
    Flag(
        name="--duplicate-stdout-filters",
        metavar="WORDS",
        default="",
        group=_LOGS,
        help="also write teed stdout lines that contain one of these words to filtered_stdout.log",
    ),
    Flag(
        name="--duplicate-stderr-filters",
        metavar="WORDS",
        default="",
        group=_LOGS,
        help="the same for stderr",
    ),
    Flag(
        name="--log-format",
        own=True,
        metavar="HOW",
        default="text",
        env=False,
        group=_LOGS,
        choices=("text", "json"),
        help="json: each line of output is a JSON object with its time, host, rank, generation and stream, in files and on"
        " the console",
    ),
    Flag(
        name="--log-max-size",
        own=True,
        metavar="SIZE",
        default="0",
        env=False,
        group=_LOGS,
        help="start a new log file when one reaches this size (500K, 100M, 2G); four full ones are kept of each (0: no limit)",
    ),
    Flag(
        name="--metrics",
        own=True,
        metavar="WHERE",
        env=False,
        group=_LOGS,
        help="metrics of this node as OpenMetrics text: :9400 serves them on that port of the loopback, HOST:9400 on an"
        " address, *:9400 on all; or a file, which is written every 10 s",
    ),
    Flag(
        name="--traces",
        own=True,
        metavar="EXPORTER",
        env=False,
        group=_LOGS,
        help="send launch, rendezvous, recoveries and rpc calls as spans of OpenTelemetry: otlp (to"
        " OTEL_EXPORTER_OTLP_ENDPOINT), console, or another exporter that is installed",
    ),
    Flag(
        name="--progress",
        own=True,
        metavar="HOW",
        default="auto",
        env=False,
        group=_LOGS,
        choices=("auto", "lines", "off"),
        help="how to show what scripts report with rallypoint.progress: auto (a bar on a terminal, otherwise an"
        " occasional line), lines, or off",
    ),
    Flag(
        name="--node-rank",
        metavar="R",
        default="0",
        group=_NODES,
        help="rank of this node (0 to nnodes-1); if left out with --rdzv-endpoint, one is assigned",
    ),
    Flag(
        name="--master-addr",
        metavar="HOST",
        default="127.0.0.1",
        group=_NODES,
        help="host of node 0, reachable from all nodes",
    ),
    Flag(
        name="--master-port",
        metavar="PORT",
        group=_NODES,
        help=f"port on node 0 (default {MASTER_PORT} with several nodes, else any free one)",
    ),
    Flag(
        name="--rdzv-backend",
        metavar="NAME",
        default="static",
        group=_NODES,
        help="how nodes meet: one of the backends below. With static, each node has its --node-rank; with the others, ranks are"
        " assigned and lost nodes replaced. If left out, it follows from --rdzv-endpoint and --node-rank",
    ),
    Flag(
        name="--rdzv-endpoint",
        metavar="WHERE",
        default="",
        group=_NODES,
        help=f"where nodes meet: HOST[:{RENDEZVOUS_PORT}] of one of them, which serves the store (several"
        " hosts with commas), or a URL as listed below",
    ),
    Flag(
        name="--rdzv-id",
        metavar="ID",
        default="none",
        group=_NODES,
        help="name of the job, the same on all its nodes",
    ),
    Flag(
        name="--rdzv-conf",
        metavar="K=V,…",
        default="",
        group=_NODES,
        help="options of the rendezvous, as listed below; those of the backend may also follow the"
        " endpoint: etcds://HOST?ca=/etc/ca.pem",
    ),
    Flag(
        name="--secret-file",
        own=True,
        metavar="FILE",
        group=_NODES,
        env=False,
        help="the job's secret, the same on all nodes; `rally secret FILE` makes one. Default: RALLY_SECRET,"
        " RALLY_SECRET_FILE or ~/.config/rallypoint/secret; a job of one node makes its own",
    ),
    Flag(
        name="--bind",
        own=True,
        metavar="ADDRESS",
        group=_NODES,
        help="address of this node to listen on, * for all. Default: the one that the other nodes use; with one"
        " node, the loopback",
    ),
    Flag(
        name="--insecure",
        own=True,
        group=_NODES,
        env=False,
        help="run several nodes without a secret: whoever can reach the job's ports is trusted",
    ),
    Flag(
        name="--local-addr",
        metavar="HOST",
        group=_NODES,
        help="address of this node that the other nodes can reach",
    ),
    Flag(
        name="--hosts",
        own=True,
        metavar="A,B:8,…",
        group=_NODES,
        env=False,
        help="start the job on these hosts, over ssh from here; HOST:N starts N workers there",
    ),
    Flag(
        name="--hostfile",
        own=True,
        metavar="FILE",
        group=_NODES,
        env=False,
        help="like --hosts, from a file with one host per line: HOST, HOST:N, or HOST slots=N",
    ),
    Flag(
        name="--ssh-options",
        own=True,
        metavar="OPTIONS",
        group=_NODES,
        env=False,
        help="options for ssh: --ssh-options='-p 2222 -i key'",
    ),
    Flag(
        name="--forward-env",
        own=True,
        metavar="A,B_*",
        group=_NODES,
        env=False,
        help="variables that --hosts passes on, in addition to RALLY_*, PET_*, PYTHON*, TORCH*, NCCL_*, GLOO_*, TP_*, OMP_*",
    ),
    Flag(
        name="--role", metavar="NAME", default="default", group=OTHER, help="ROLE_NAME of workers"
    ),
    Flag(
        name="--module",
        short="-m",
        group=_START,
        help="the target is a module, as in python -m",
    ),
    Flag(
        name="--no-python",
        group=_START,
        help="the target is any program, not a Python script",
    ),
    Flag(
        name="--start-method",
        metavar="HOW",
        group=_START,
        choices=("forkserver", "exec", "spawn", "fork"),
        help="forkserver (default): workers are forks of a process that has imported torch;"
        " exec: plain interpreters",
    ),
    Flag(
        name="--preload",
        own=True,
        metavar="A,B",
        default="",
        group=_START,
        env=False,
        help="modules to import before the workers fork, in addition to torch",
    ),
    Flag(
        name="--no-learned-preload",
        own=True,
        group=_START,
        help="for restarted workers, do not preload the parts of torch and rallypoint that earlier workers imported",
    ),
    Flag(
        name="--preflight",
        own=True,
        group=_START,
        env=False,
        help="run `rally doctor` first, with the same flags, and start only if it finds no problem",
    ),
    Flag(
        name="--warm",
        own=True,
        group=_START,
        env=False,
        help="keep a process that has imported torch after the job, and start from it if there is one: no waiting"
        " for `import torch`; `rally warm` shows and ends it",
    ),
    Flag(
        name="--warm-timeout",
        own=True,
        metavar="S",
        default="600",
        env=False,
        group=_START,
        help="with --warm, seconds without a job after which that process ends",
    ),
    Flag(
        name="--unbuffered",
        own=True,
        short="-u",
        group=_START,
        env=False,
        help="workers' stdout is unbuffered, as with python -u and torchrun; by default, a line is"
        " written when it is complete",
    ),
    Flag(
        name="--block-buffered",
        own=True,
        group=_START,
        env=False,
        help="workers' stdout is buffered in blocks if it is a file or pipe: faster for megabytes"
        " of output, but lost if a worker is killed",
    ),
    Flag(
        name="--templates",
        own=True,
        group=_START,
        env=False,
        help="replace {rank}, {local_rank}, {node_rank} and {generation} in the script's arguments with"
        " the worker's own values",
    ),
    Flag(
        name="--virtual-local-rank",
        group=_START,
        help="each worker sees one device: LOCAL_RANK=0, its own CUDA_VISIBLE_DEVICES",
    ),
    Flag(
        name="--numa-binding",
        metavar="HOW",
        env=False,
        group=_START,
        choices=("node", "socket", "exclusive", "core-complex"),
        help="bind each worker to CPUs near its GPU: node, socket, exclusive, core-complex",
    ),
    Flag(
        name="--monitor-interval",
        metavar="S",
        default="0.1",
        group=OTHER,
        help="no effect: a worker that ends is noticed at once",
    ),
    Flag(
        name="--event-log-handler",
        metavar="NAME",
        default="null",
        group=OTHER,
        help="no effect: set RALLY_EVENTS=FILE instead",
    ),
    Flag(
        name="--logs-specs",
        metavar="NAME",
        env=False,
        group=OTHER,
        help="no effect: use the flags for logs above",
    ),
    Flag(
        name="--run-path",
        group=OTHER,
        help="no effect: scripts always run this way",
    ),
)

BY_NAME: Mapping[str, Flag] = {flag.name: flag for flag in FLAGS} | {
    flag.short: flag for flag in FLAGS if flag.short
}
