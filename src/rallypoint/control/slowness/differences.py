"""How a slow rank differs from the others on its host, by what the system reports about them. Pure."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from rallypoint._core.rank_words import numbers_in_words


# A share of the time must exceed twice the others' by this much.
SHARE = 0.05
# Major page faults per second that slow a process down: each of them reads from a disk.
FAULTS = 20.0
# The clock of its CPUs as a fraction of the others'.
CLOCK = 0.9
# Memory swapped out, in bytes.
SWAPPED = 16 << 20
# The share of its memory on another NUMA node than its CPUs.
REMOTE = 0.3


@dataclass(frozen=True, kw_only=True, slots=True)
class Surroundings:
    """A worker between two looks.

    Args:
        cpu: the share of the time in which its main thread ran.
        cpu_wait: the share in which its main thread was runnable but had no CPU.
        throttled: the share in which its control group was not allowed to run.
        memory_pressure: the share in which all of its control group waited for memory.
        disk_wait: the share in which its main thread waited for a disk.
        faults: major page faults per second.
        swapped: bytes that are swapped out.
        nice: its priority; 0 is usual, 19 yields to all others.
        cpus: the CPUs that it may use.
        clock: their mean frequency in MHz; 0: unknown.
        remote: the share of its memory that is on another NUMA node than its CPUs.
        neighbours: what else runs on its CPUs, in words, most CPU time first; empty if nothing does.
        group: its control group.
    """

    cpu: float = 0.0
    cpu_wait: float = 0.0
    throttled: float = 0.0
    memory_pressure: float = 0.0
    disk_wait: float = 0.0
    faults: float = 0.0
    swapped: int = 0
    nice: int = 0
    cpus: tuple[int, ...] = ()
    clock: float = 0.0
    remote: float = 0.0
    neighbours: str = ""
    group: str = ""


def differences(slow: Surroundings, others: Sequence[Surroundings]) -> list[str]:
    """How the slow rank differs, in words, the likeliest cause first; empty if it does not.

    Args:
        slow: the slow rank.
        others: the other workers on its host.
    """

    def usual(of: Callable[[Surroundings], float]) -> float:
        return _median([of(each) for each in others])

    def stands_out(of: Callable[[Surroundings], float]) -> bool:
        return of(slow) > SHARE + 2 * usual(of)

    found = []
    if stands_out(lambda each: each.throttled):
        where = f" ({slow.group})" if slow.group else ""
        found.append(f"its control group{where} was throttled {slow.throttled:.0%} of the time")
    if stands_out(lambda each: each.cpu_wait):
        text = f"its main thread had to wait for a CPU {slow.cpu_wait:.0%} of the time"
        text += f" (the others: {usual(lambda each: each.cpu_wait):.0%})"
        if slow.neighbours:
            text += f": {slow.neighbours} on the same CPUs"
        found.append(text)
    fewest = min((len(each.cpus) for each in others), default=0)
    if slow.cpus and len(slow.cpus) < fewest:
        plural = "CPU" if len(slow.cpus) == 1 else "CPUs"
        found.append(f"it may use {plural} {numbers_in_words(slow.cpus)} only, the others {fewest}")
    if slow.nice > usual(lambda each: each.nice):
        found.append(f"its priority is lower (nice {slow.nice})")
    if stands_out(lambda each: each.memory_pressure):
        found.append(f"it had to wait for memory {slow.memory_pressure:.0%} of the time")
    if slow.swapped > SWAPPED + 2 * usual(lambda each: each.swapped):
        found.append(f"{slow.swapped / (1 << 20):.0f} MiB of it are swapped out")
    if slow.faults > FAULTS + 2 * usual(lambda each: each.faults):
        found.append(f"it reads memory from disk ({slow.faults:.0f} major page faults per second)")
    if stands_out(lambda each: each.disk_wait):
        found.append(f"it waits for a disk {slow.disk_wait:.0%} of the time")
    clock = usual(lambda each: each.clock)
    if 0 < slow.clock < CLOCK * clock:
        found.append(f"its CPUs run at {slow.clock:.0f} MHz, the others' at {clock:.0f}")
    if slow.remote > REMOTE + usual(lambda each: each.remote):
        found.append(f"{slow.remote:.0%} of its memory are on another NUMA node than its CPUs")
    return found or _by_cpu_time(slow, usual(lambda each: each.cpu))


def _by_cpu_time(slow: Surroundings, usual: float) -> list[str]:
    """Whether it computes or waits, if nothing else explains it."""
    if slow.cpu > usual + SHARE:
        return ["it computes more than they do: more data, or a larger part of the model?"]
    if slow.cpu + SHARE < usual or slow.cpu < 0.5:
        return ["it computes no more than they do: it waits, for data or for something else"]
    return []


def _median(values: Sequence[float]) -> float:
    return sorted(values)[len(values) // 2] if values else 0.0
