"""What is a problem, and what a remark. Pure."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum

from rallypoint._core.addresses import is_loopback

from .facts import AllReduce, Link, NodeFacts


KIB, MIB, GIB = 1 << 10, 1 << 20, 1 << 30

# A process with Gloo connections to 250 others and a few DataLoader workers has about this many open files.
FEW_FILES, VERY_FEW_FILES = 4096, 512
# Docker gives a container 64 MiB; a DataLoader worker keeps a few batches there, NCCL 33 MiB per ring.
LITTLE_SHM, VERY_LITTLE_SHM = 1 * GIB, 64 * MIB
LITTLE_DISK, VERY_LITTLE_DISK = 1 * GIB, 64 * MIB
# Private memory of a worker that has imported torch and holds a small model.
MEMORY_PER_WORKER = 256 * MIB
# Threads of a worker: Gloo's, autograd's, the DataLoader's.
THREADS_PER_WORKER = 32
# Over a network of 1 Gbit/s: 117 MB/s. Wireless and throttled ones have less.
SLOW_LINK, VERY_SLOW_LINK = 50e6, 10e6
# A pair is odd if its bandwidth is less than this fraction of the median.
ODD_PART = 0.25
# Within one site: less than 1 ms.
LONG_LATENCY = 0.005
CLOCK_OFFSET = 1.0
# At most this many nodes are named.
MOST_NAMES = 4


class Level(StrEnum):
    PROBLEM = "problem"  # a job would fail, or crawl
    REMARK = "remark"  # it may matter
    FINE = "fine"


_ORDER = list(Level)


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing that was checked.

    Args:
        level: whether it is a problem.
        where: the node or nodes; empty: all.
        what: the check.
        found: the value.
        advice: what to do; may be empty.
    """

    level: Level
    where: str
    what: str
    found: str
    advice: str = ""


def judge(
    nodes: Sequence[NodeFacts],
    links: Sequence[Link] = (),
    all_reduce: AllReduce | None = None,
    *,
    several: bool = False,
    meeting: str = "",
) -> list[Finding]:
    """All findings, problems first.

    Args:
        nodes: by node rank; only this one if the nodes could not meet.
        links: the links between them.
        all_reduce: the all-reduce over all of them; None: it was not tried.
        several: the job has several nodes.
        meeting: why the nodes could not meet; empty: they have, or there is only one.
    """
    found: list[Finding] = []
    if meeting:
        found.append(Finding(Level.PROBLEM, "", "meeting", meeting))
    elif len(nodes) > 1:
        found.append(Finding(Level.FINE, "", "meeting", f"{len(nodes)} nodes have met"))
    of_nodes: list[Finding] = []
    for index, node in enumerate(nodes):
        where = name_of(index, node) if len(nodes) > 1 else ""
        for check in _CHECKS:
            of_nodes += check(where, node)
        of_nodes += _network(where, node, several=several)
    found += _together(of_nodes, len(nodes))
    found += _versions(nodes)
    found += _gpu_counts(nodes)
    found += _links(nodes, links)
    if all_reduce is not None:
        found += _all_reduce(all_reduce)
    return sorted(found, key=lambda each: _ORDER.index(each.level))


def _together(findings: Sequence[Finding], count: int) -> Iterator[Finding]:
    """One finding where several nodes have the same."""
    where: dict[Finding, list[str]] = {}
    for each in findings:
        where.setdefault(replace(each, where=""), []).append(each.where)
    for each, names in where.items():
        if len(names) == count > 1:
            yield replace(each, where="all nodes")
        elif len(names) > MOST_NAMES:
            rest = f" and {len(names) - MOST_NAMES} more"
            yield replace(each, where=", ".join(names[:MOST_NAMES]) + rest)
        else:
            yield replace(each, where=", ".join(names))


def is_healthy(findings: Sequence[Finding]) -> bool:
    return all(each.level is not Level.PROBLEM for each in findings)


def name_of(index: int, node: NodeFacts) -> str:
    return f"node {index} ({node.host})"


# -- one node -----------------------------------------------------------------------------------------


def _open_files(where: str, node: NodeFacts) -> Iterator[Finding]:
    what, limit = "open files", node.open_files
    advice = "ulimit -Hn, LimitNOFILE= of a service, docker --ulimit nofile="
    if limit is None or limit >= FEW_FILES:
        yield Finding(Level.FINE, where, what, _count(limit))
    elif limit >= VERY_FEW_FILES:
        yield Finding(Level.REMARK, where, what, f"at most {limit} per process", advice)
    else:
        yield Finding(Level.PROBLEM, where, what, f"at most {limit} per process", advice)


def _cpu_time(where: str, node: NodeFacts) -> Iterator[Finding]:
    what, limit = "CPU time", node.cpu_seconds
    if limit is None:
        yield Finding(Level.FINE, where, what, "no limit")
    else:
        found = f"a process is killed after {limit} s of CPU time"
        yield Finding(
            Level.REMARK, where, what, found, "ulimit -t; on a login node: submit the job"
        )


def _file_size(where: str, node: NodeFacts) -> Iterator[Finding]:
    what, limit = "file size", node.file_size
    if limit is None:
        yield Finding(Level.FINE, where, what, "no limit")
    else:
        found = f"at most {size(limit)}, also in memory and for checkpoints"
        yield Finding(Level.REMARK, where, what, found, "ulimit -f")


def _locked_memory(where: str, node: NodeFacts) -> Iterator[Finding]:
    what, limit = "locked memory", node.locked_memory
    shown = "no limit" if limit is None else f"at most {size(limit)} per process"
    if node.infiniband and limit is not None and limit < 64 * MIB:
        advice = "InfiniBand locks its buffers: ulimit -l unlimited, docker --ulimit memlock=-1"
        yield Finding(Level.PROBLEM, where, what, shown, advice)
    else:
        yield Finding(Level.FINE, where, what, shown)


def _processes(where: str, node: NodeFacts) -> Iterator[Finding]:
    what, limit = "processes", node.processes
    if node.too_many_workers:
        yield Finding(Level.PROBLEM, where, what, node.too_many_workers, "start fewer workers")
        return
    shown = _count(limit) + (f" ({node.processes_limit})" if limit is not None else "")
    need = (node.workers or node.cpus) * THREADS_PER_WORKER
    if limit is not None and limit < need:
        advice = f"{node.workers or node.cpus} workers have about {need} threads: ulimit -u, docker --pids-limit"
        yield Finding(Level.REMARK, where, what, f"at most {shown}", advice)
    else:
        yield Finding(Level.FINE, where, what, shown)


def _cpus(where: str, node: NodeFacts) -> Iterator[Finding]:
    what, workers = "CPUs", node.workers or 1
    usable = float(node.cpus) if node.quota is None else min(float(node.cpus), node.quota)
    shown = f"{node.cpus}"
    if node.quota is not None and node.quota < node.cpus:
        shown = f"{node.quota:g} of {node.cpus} (quota of the control group)"
    if usable < workers:
        advice = f"{workers} workers share them: start fewer, or raise the quota"
        yield Finding(Level.REMARK, where, what, shown, advice)
    elif node.quota is not None and node.quota < node.cpus:
        advice = "threads beyond the quota are paused all together: set OMP_NUM_THREADS to fit"
        yield Finding(Level.REMARK, where, what, shown, advice)
    else:
        yield Finding(Level.FINE, where, what, shown)


def _memory(where: str, node: NodeFacts) -> Iterator[Finding]:
    if node.memory is None:
        return
    need = (node.workers or 1) * MEMORY_PER_WORKER
    shown = f"{size(node.memory)} available"
    if node.memory < need:
        advice = f"{node.workers or 1} workers need at least {size(need)}"
        yield Finding(Level.PROBLEM, where, "memory", shown, advice)
    else:
        yield Finding(Level.FINE, where, "memory", shown)


def _shm(where: str, node: NodeFacts) -> Iterator[Finding]:
    what = "/dev/shm"  # noqa: S108  named, not used
    if node.shm_total is None or node.shm_free is None:
        advice = "mount a tmpfs there: DataLoader workers and NCCL need it"
        yield Finding(Level.PROBLEM, where, what, "missing", advice)
        return
    shown = f"{size(node.shm_free)} free of {size(node.shm_total)}"
    if node.shm_free <= VERY_LITTLE_SHM:
        level, advice = (
            Level.PROBLEM,
            "DataLoader workers and NCCL fail when it is full: docker --shm-size=8g, --ipc=host",
        )
    elif node.shm_free < LITTLE_SHM:
        level, advice = Level.REMARK, "little for DataLoader workers: docker --shm-size=8g"
    else:
        level, advice = Level.FINE, ""
    yield Finding(level, where, what, shown, advice)


def _disk(where: str, node: NodeFacts) -> Iterator[Finding]:
    if node.folder_problem:
        advice = "TMPDIR and --log-dir name folders that this user may write to"
        yield Finding(Level.PROBLEM, where, "disk", node.folder_problem, advice)
    for folder, free in (node.folders or {}).items():
        level = Level.FINE
        if free < LITTLE_DISK:
            level = Level.PROBLEM if free < VERY_LITTLE_DISK else Level.REMARK
        advice = "" if level is Level.FINE else "logs and checkpoints need space"
        yield Finding(level, where, "disk", f"{size(free)} free in {folder}", advice)


def _gpus(where: str, node: NodeFacts) -> Iterator[Finding]:
    if node.gpu_problem:
        advice = "nvidia-smi says more; a reboot of the node may help"
        yield Finding(Level.PROBLEM, where, "GPUs", node.gpu_problem, advice)
    for index, gpu in enumerate(node.gpus):
        if gpu.errors:
            found = f"GPU {index} ({gpu.name}): {gpu.errors} uncorrected memory errors"
            yield Finding(Level.PROBLEM, where, "GPUs", found, "reset or replace it")
        if gpu.slowed:
            found = f"GPU {index} ({gpu.name}): clock held down: {gpu.slowed}"
            yield Finding(Level.REMARK, where, "GPUs", found, "check cooling and power")
    if node.gpus and not node.gpu_problem:
        names = sorted({gpu.name for gpu in node.gpus})
        yield Finding(Level.FINE, where, "GPUs", f"{len(node.gpus)}: {', '.join(names)}")


_CHECKS: tuple[Callable[[str, NodeFacts], Iterator[Finding]], ...] = (
    _open_files,
    _cpu_time,
    _file_size,
    _locked_memory,
    _processes,
    _cpus,
    _memory,
    _shm,
    _disk,
    _gpus,
)


def _network(where: str, node: NodeFacts, *, several: bool) -> Iterator[Finding]:
    leads = f"{node.host} resolves to {node.name_address}" if node.name_address else "no address"
    name_is_inward = not node.name_address or is_loopback(node.name_address)
    if node.loopback_problem and not several:
        found = f"cannot be reached: {node.loopback_problem}"
        yield Finding(
            Level.PROBLEM, where, "loopback", found, "workers meet there: ip link set lo up"
        )
    interface, address = node.gloo
    shown = f"{interface} ({address})" if interface else address or "none"
    if several and address and is_loopback(address):
        advice = f"other nodes cannot reach it: {_own_name(node)}, or set GLOO_SOCKET_IFNAME"
        yield Finding(Level.PROBLEM, where, "Gloo's interface", shown, advice)
    else:
        yield Finding(Level.FINE, where, "Gloo's interface", shown)
    if several and name_is_inward:
        advice = f"programs that look it up get the loopback interface: {_own_name(node)}"
        yield Finding(Level.REMARK, where, "host name", leads, advice)
    else:
        yield Finding(Level.FINE, where, "host name", leads)
    if node.gpus:
        nccl = ", ".join(node.nccl) or "none"
        yield Finding(Level.FINE, where, "NCCL's interfaces", nccl)


def _own_name(node: NodeFacts) -> str:
    return f"give {node.host} its own address in /etc/hosts"


# -- all nodes ----------------------------------------------------------------------------------------


def _versions(nodes: Sequence[NodeFacts]) -> Iterator[Finding]:
    of: tuple[tuple[str, Callable[[NodeFacts], str]], ...] = (
        ("torch", lambda node: node.torch),
        ("Python", lambda node: node.python),
        ("rallypoint", lambda node: node.rallypoint),
        ("GPU driver", lambda node: ", ".join(sorted({gpu.driver for gpu in node.gpus}))),
    )
    for what, version in of:
        values = [version(node) for node in nodes]
        if what == "torch" and "" in values:
            index = values.index("")
            where = name_of(index, nodes[index]) if len(nodes) > 1 else ""
            advice = "install it in the environment of rally"
            yield Finding(Level.PROBLEM, where, what, "not installed", advice)
        elif len(set(values)) > 1:
            usual = statistics.mode(values)
            odd = [
                f"{name_of(index, node)}: {value or 'none'}"
                for index, (node, value) in enumerate(zip(nodes, values, strict=True))
                if value != usual
            ]
            level = Level.REMARK if what == "GPU driver" else Level.PROBLEM
            found = f"{usual or 'none'}, but {'; '.join(odd)}"
            yield Finding(level, "", what, found, "install the same version on all nodes")
        elif values and values[0]:
            yield Finding(Level.FINE, "", what, values[0])


def _gpu_counts(nodes: Sequence[NodeFacts]) -> Iterator[Finding]:
    counts = [len(node.gpus) for node in nodes]
    if len(set(counts)) > 1:
        told = [f"{name_of(i, node)}: {counts[i]}" for i, node in enumerate(nodes)]
        yield Finding(Level.REMARK, "", "GPUs", "; ".join(told), "nodes have different numbers")


def _links(nodes: Sequence[NodeFacts], links: Sequence[Link]) -> Iterator[Finding]:
    rates = [each.bandwidth for each in links if each.bandwidth is not None]
    middle = statistics.median(rates) if rates else 0.0
    slow: list[Finding] = []
    for link in links:
        where = f"{name_of(link.source, nodes[link.source])} to {name_of(link.target, nodes[link.target])}"
        if link.problem:
            advice = (
                "Gloo and NCCL use any port: let the firewall pass all traffic between the nodes"
            )
            yield Finding(Level.PROBLEM, where, "connection", link.problem, advice)
            continue
        rate = link.bandwidth
        if rate is not None:
            is_odd = len(rates) > 2 and rate < ODD_PART * middle
            level = Level.FINE
            if rate < SLOW_LINK or is_odd:
                level = Level.PROBLEM if rate < VERY_SLOW_LINK or is_odd else Level.REMARK
            if level is not Level.FINE:
                found = speed(rate) + (f", others {speed(middle)}" if is_odd else "")
                advice = "check the cable, the switch and the interface that is used"
                slow.append(Finding(level, where, "bandwidth", found, advice))
        if link.latency is not None and link.latency > LONG_LATENCY:
            found = f"{link.latency * 1e3:.1f} ms"
            advice = "every collective waits for it: are the nodes in one place?"
            slow.append(Finding(Level.REMARK, where, "latency", found, advice))
    yield from slow
    if rates:
        times = [each.latency for each in links if each.latency is not None]
        ways = _span([f"{1e3 * min(times):.2f} ms", f"{1e3 * max(times):.2f} ms"])
        found = f"{_span([speed(min(rates)), speed(max(rates))])}, {ways}"
        yield Finding(Level.FINE, "", "TCP between pairs", found)
    yield from _clocks(nodes, links)


def _clocks(nodes: Sequence[NodeFacts], links: Sequence[Link]) -> Iterator[Finding]:
    offsets = {
        each.target: each.clock for each in links if each.source == 0 and each.clock is not None
    }
    for target, offset in sorted(offsets.items()):
        if abs(offset) >= CLOCK_OFFSET:
            where = name_of(target, nodes[target])
            side = "ahead of" if offset > 0 else "behind"
            found = f"{abs(offset):.1f} s {side} node 0"
            advice = (
                "rally does not compare clocks, but logs are hard to read: chronyc, timedatectl"
            )
            yield Finding(Level.REMARK, where, "clock", found, advice)
    if offsets and all(abs(each) < CLOCK_OFFSET for each in offsets.values()):
        most = max(abs(each) for each in offsets.values())
        yield Finding(Level.FINE, "", "clocks", f"within {most * 1e3:.1f} ms of node 0's")


def _all_reduce(found: AllReduce) -> Iterator[Finding]:
    if found.problem:
        yield Finding(Level.PROBLEM, "", "all-reduce", found.problem)
    elif found.latency is not None and found.bandwidth is not None:
        shown = f"{found.latency * 1e3:.2f} ms, {speed(found.bandwidth)}"
        yield Finding(Level.FINE, "", "all-reduce (Gloo)", shown)


# -- words --------------------------------------------------------------------------------------------


def size(number: float) -> str:
    """``1.5 GiB``."""
    for unit, factor in (("TiB", 1 << 40), ("GiB", GIB), ("MiB", MIB), ("KiB", KIB)):
        if number >= factor:
            value = number / factor
            return f"{value:.0f} {unit}" if value >= 10 else f"{value:.1f} {unit}"
    return f"{number:.0f} B"


def speed(rate: float) -> str:
    """``117 MB/s``, as is usual for networks: in powers of ten."""
    return f"{rate / 1e9:.1f} GB/s" if rate >= 1e9 else f"{rate / 1e6:.1f} MB/s"


def _span(values: Sequence[str]) -> str:
    return values[0] if len(set(values)) == 1 else " to ".join(values)


def _count(limit: int | None) -> str:
    return "no limit" if limit is None else str(limit)
