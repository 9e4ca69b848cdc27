"""How soon the survivors of a lost node step again if another node waits: a session over four hosts; prints JSON.

    python bench/node_losses.py --losses 2
    python bench/node_losses.py --output bench/results/node_losses.json

Four hosts (network namespaces, which need root and iproute2) have a supervisor and two workers each, and a fifth one waits. A
supervisor, a whole node or the node with the store is killed, or a host's cable is cut. The fifth host, which has waited for a
while, takes the lost one's place; the lost one is started again and waits. Time is measured from the moment the first supervisor
reports the loss (``known``), and from the fault, until the last survivor has completed its first step with all others after the
recovery. That step itself takes a while. See bench/README.md.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import shutil
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import psutil
from hosts import Network, address, available, processes_with
from jobs import Progress, machine, publish, spread
from soak_elastic import HOSTS, LEASE, MARK, PORT
from soak_session_nodes import PATIENCE, RANKS, SessionHost
from soak_sessions import TRAIN, Board


KILLED = ("supervisor killed", "node killed", "node with the store killed")
SILENT = ("cable cut", "cable of the store cut")
KINDS = (*KILLED, *SILENT)
_OF_THE_STORE = ("node with the store killed", "cable of the store cut")
# More than any run makes.
STEPS = 1_000_000
# Promised seconds: from a known loss, and beyond the lease if a host is silent.
KNOWN, BEYOND = 0.5, 0.5
_WAITS = "waiting as a spare"


class AnyHost(SessionHost):
    """A host of a job whose endpoint names all five: any of them may end up serving the store."""

    def words(self) -> list[str]:
        words = super().words()
        words[words.index("--rdzv-endpoint") + 1] = ",".join(
            f"{address(index)}:{PORT}" for index in range(HOSTS + 1)
        )
        return words


class Hosts:
    """The hosts of a job, and which of them waits."""

    def __init__(self, network: Network, folder: Path, mark: str, rng: random.Random) -> None:
        self._network = network
        self._folder = folder
        self._rng = rng
        self._all = [
            AnyHost(index, network, folder, mark, STEPS, "ddp", 0) for index in range(HOSTS + 1)
        ]
        *self.members, self.waits = self._all

    def start(self, board: Board) -> None:
        for host in self.members:
            host.start()
        until(lambda: all(steps > 3 for _, steps, _ in board.lines()), "the job trains")
        self._join_as_spare(self.waits)

    def _join_as_spare(self, host: AnyHost) -> None:
        log = self._folder / f"host{host.index}.log"
        before = log.read_text().count(_WAITS) if log.exists() else 0
        host.start()
        until(lambda: log.read_text().count(_WAITS) > before, f"host {host.index} waits")

    def choose(self, kind: str) -> AnyHost:
        if kind in _OF_THE_STORE:
            return max(self.members, key=lambda each: each.served())
        store = max(self.members, key=lambda each: each.served())
        return self._rng.choice([each for each in self.members if each is not store])

    def strike(self, kind: str, host: AnyHost) -> None:
        assert host.process is not None
        if kind in SILENT:
            self._network.cable(host.index, "down")
        elif kind == "supervisor killed":
            host.process.kill()
        else:
            for process in host.tree():
                with contextlib.suppress(psutil.Error):
                    process.kill()

    def mend(self, kind: str, host: AnyHost) -> None:
        """The lost host comes back, and waits."""
        if kind in SILENT:
            for process in host.tree():
                with contextlib.suppress(psutil.Error):
                    process.kill()
            self._network.cable(host.index, "up")
        assert host.process is not None
        host.process.wait(20)
        self.members[self.members.index(host)], self.waits = self.waits, host
        self._join_as_spare(host)


def until(condition: Any, what: str) -> None:
    deadline = time.monotonic() + PATIENCE
    while not condition():
        if time.monotonic() > deadline:
            raise SystemExit(f"in vain: {what}")
        time.sleep(0.001)  # a bench may poll what it measures


def recovered_step(events: Path, since: float) -> int:
    """How many steps were complete when the workers had met again."""
    told = map(json.loads, events.read_text().splitlines())
    return min(
        int(each["steps"])
        for each in told
        if each["kind"] == "session_recovered" and each["monotonic"] > since
    )


def known_at(events: Path, since: float) -> float | None:
    """When the first supervisor knew of a loss."""
    told = map(json.loads, events.read_text().splitlines())
    found = [
        each["monotonic"]
        for each in told
        if each["monotonic"] > since
        and (each["kind"] in ("node_lost", "store_lost") or each.get("what") == "lost")
    ]
    return min(found, default=None)


def lose(kind: str, hosts: Hosts, board: Board, events: Path) -> tuple[float | None, float, bool]:
    """Cause one loss.

    Returns:
        Seconds until the last survivor has stepped, from a known loss and from the fault; whether survivors kept their processes.
    """
    host = hosts.choose(kind)
    theirs = {process.pid for process in host.tree()}
    before = board.lines()
    others = [rank for rank in range(RANKS) if before[rank][0] not in theirs]
    assert len(others) == RANKS - RANKS // HOSTS, (before, theirs)
    stepped_at: dict[int, dict[int, float]] = {rank: {} for rank in others}
    at = time.monotonic()
    hosts.strike(kind, host)

    def all_are_beyond(steps: Sequence[int]) -> bool:
        lines = board.lines()
        for rank, times in stepped_at.items():
            _, position, last = lines[rank]
            if last > at:
                times.setdefault(position, last)
        return all(lines[rank][1] > steps[rank] for rank in others)

    beyond_next = [position + 1 for _, position, _ in before]
    until(lambda: all_are_beyond(beyond_next), f"{kind}: survivors step again")
    # A step that was completed with the lost ranks' gradients is not one after the loss.
    complete = recovered_step(events, at)
    until(lambda: all_are_beyond([complete] * RANKS), f"{kind}: survivors step again")
    until(lambda: all(last > at for _, _, last in board.lines()), f"{kind}: all step")
    after = board.lines()
    known = known_at(events, at)
    stepped = max(
        min(time for position, time in times.items() if position > complete)
        for times in stepped_at.values()
    )
    kept = all(after[rank][0] == before[rank][0] for rank in others)
    hosts.mend(kind, host)
    return None if known is None else stepped - known, stepped - at, kept


def measure(options: argparse.Namespace, progress: Progress) -> dict[str, dict[str, Any]]:
    folder = Path(tempfile.mkdtemp(prefix="rally-losses-"))
    (folder / "train.py").write_text(TRAIN)
    events = folder / "events"
    os.environ["RALLY_EVENTS"] = str(events)
    board = Board(folder, RANKS)
    mark = f"losses-{os.getpid()}"
    rng = random.Random(options.seed)
    from_known: dict[str, list[float]] = defaultdict(list)
    from_fault: dict[str, list[float]] = defaultdict(list)
    all_kept = True
    with Network(HOSTS + 1) as network:
        try:
            hosts = Hosts(network, folder, mark, rng)
            progress.step("start")
            hosts.start(board)
            for number in range(options.losses * len(KINDS)):
                kind = KINDS[number % len(KINDS)]
                progress.step(kind)
                time.sleep(options.waits + rng.uniform(0.0, 1.0))
                known, fault, kept = lose(kind, hosts, board, events)
                if known is not None:
                    from_known[kind].append(known)
                from_fault[kind].append(fault)
                all_kept = all_kept and kept
        except BaseException:
            print(f"logs: {folder}", file=sys.stderr)
            raise
        finally:
            for process in processes_with(MARK, mark):
                with contextlib.suppress(psutil.Error):
                    process.kill()
    shutil.rmtree(folder)
    return {
        "survivors_step_after_known_s": {kind: spread(from_known[kind]) for kind in KINDS},
        "survivors_step_after_fault_s": {kind: spread(from_fault[kind]) for kind in KINDS},
        "survivors_keep_their_process": {"holds": all_kept},
    }


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--losses", type=int, default=10, help="of each kind (10)")
    parser.add_argument(
        "--waits", type=float, default=15.0, help="seconds that the fifth host waits, at least (15)"
    )
    parser.add_argument("--seed", type=int, default=7, help="of instants and victims (7)")
    parser.add_argument("--output", type=Path, help="also write the JSON here")
    options = parser.parse_args()
    if not available():
        raise SystemExit("needs root and iproute2")
    found = measure(options, Progress(1 + options.losses * len(KINDS)))
    known, fault = found["survivors_step_after_known_s"], found["survivors_step_after_fault_s"]
    targets = [
        {
            "what": f"{kind}: survivors step at most {KNOWN} s after the loss is known, median",
            "value": known[kind]["median"],
            "holds": known[kind]["median"] is not None and known[kind]["median"] <= KNOWN,
        }
        for kind in KILLED
    ]
    for kind in SILENT:
        silent = fault[kind]["median"]
        targets.append(
            {
                "what": f"{kind}: survivors step at most {BEYOND} s after the lease of {LEASE} s, median",
                "value": silent,
                "holds": silent is not None and silent <= LEASE + BEYOND,
            }
        )
    targets.append(
        {
            "what": "survivors keep their process",
            "holds": found["survivors_keep_their_process"]["holds"],
        }
    )
    result = {
        "benchmark": "node_losses",
        "machine": machine(),
        "lease_s": LEASE,
        "waits_s": options.waits,
        **found,
        "targets": targets,
    }
    return 1 if publish(result, options.output) else 0


if __name__ == "__main__":
    sys.exit(main())
