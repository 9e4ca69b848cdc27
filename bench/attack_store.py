"""A stranger replays, moves and rewrites records in the store of a running elastic job; prints JSON.

    python bench/attack_store.py --hosts 2 --operations 500
    python bench/attack_store.py --output bench/results/attack_store.json

Four hosts (network namespaces, which need root and iproute2; otherwise supervisors side by side on this host) run an elastic
job with a secret. On a fifth host, or with --here on the same one, a stranger (another user, if this runs as root) reaches the
job's store without knowing the secret. It reads all keys, and overwrites records with old, altered and unsigned values, and those
of other keys. Meanwhile a worker is killed, then a supervisor: no round may be wrong under attack, and the job must succeed.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import secrets
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from contextlib import ExitStack, suppress
from datetime import timedelta
from pathlib import Path
from typing import Any

from hosts import Network, address, available
from jobs import RALLY, machine, publish


# A job that has not got that far within this many seconds never will.
GIVE_UP = 300.0
LEASE = 5.0
NOBODY = 65534

TRAIN = """
import json, os, pathlib, sys, time
import torch, torch.distributed as dist

folder = pathlib.Path(sys.argv[1])

def note(**what):
    fd = os.open(folder / "notes", os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    os.write(fd, json.dumps(what).encode() + b"\\n")
    os.close(fd)

dist.init_process_group("gloo")
rank, world, generation = dist.get_rank(), dist.get_world_size(), int(os.environ["RALLY_GENERATION"])
mine, all_of_them = torch.tensor([rank, world, generation]), [torch.zeros(3, dtype=torch.long) for _ in range(world)]
dist.all_gather(all_of_them, mine)
right = [each.tolist() for each in all_of_them] == [[i, world, generation] for i in range(world)]
note(generation=generation, rank=rank, world=world, right=right, pid=os.getpid(), host=os.environ["BENCH_HOST"])
while True:
    end = torch.tensor([float((folder / "finish").exists())])
    dist.all_reduce(end)
    if end.item():
        break
    time.sleep(0.02)
note(finished=generation, rank=rank)
"""


# -- the stranger ---------------------------------------------------------------------------------


def attack(host: str, port: int, operations: int, seed: int) -> None:
    """Overwrite records. Reports on stdout how far it is, and at the end what it has done."""
    from torch.distributed import TCPStore  # type: ignore[attr-defined]

    if os.geteuid() == 0:
        os.setgroups([])
        os.setresgid(NOBODY, NOBODY, NOBODY)
        os.setresuid(NOBODY, NOBODY, NOBODY)
    store = TCPStore(host, port, None, False, timedelta(seconds=20), wait_for_workers=False)
    chance = random.Random(seed)
    history: dict[str, list[bytes]] = {}
    done: Counter[str] = Counter()
    number = 0
    while number < operations:
        if number % 100 == 0:
            _look(store, history)
            print(json.dumps({"at": number}), flush=True)
        key = chance.choice(sorted(history))
        how, value = _forgery(chance, key, history)
        store.set(key, value)
        done[how] += 1
        number += 1
        time.sleep(0.002)  # at the job's own pace: its new values are seen, and replayed later
    print(json.dumps({"at": number, "done": dict(done), "keys": len(history)}), flush=True)


def _look(store: Any, history: dict[str, list[bytes]]) -> None:
    for key in store.list_keys():
        # c10d deletes keys meanwhile, and waiting for a deleted one would take long.
        if not store.check([key]):
            continue
        value = store.get(key)
        values = history.setdefault(key, [])
        if b"{" in value and value not in values and b"forged" not in value:
            values.append(value)
        if not values:
            del history[key]  # a counter


def _forgery(chance: random.Random, key: str, history: dict[str, list[bytes]]) -> tuple[str, bytes]:
    value = chance.choice(history[key])
    match chance.randrange(4):
        case 0:
            return "replayed", value
        case 1:
            return "moved", chance.choice(history[chance.choice(sorted(history))])
        case 2:
            at = chance.randrange(len(value))
            return "changed", value[:at] + bytes([value[at] ^ 1]) + value[at + 1 :]
        case _:
            body = {"generation": 99, "leader": "forged", "closed": "forged", "beat": 10**6}
            return "unsigned", json.dumps({"v": 1, "body": body}).encode()


# -- the job --------------------------------------------------------------------------------------


class Attacked:
    """The job, host by host."""

    def __init__(self, folder: Path, network: Network | None) -> None:
        self.folder = folder
        self._network = network
        self.hosts: dict[int, subprocess.Popen[bytes]] = {}
        with socket.socket() as sock:
            sock.bind(("127.0.0.1", 0))
            self.port = sock.getsockname()[1] if network is None else 29400
        self.addr = "127.0.0.1" if network is None else address(0)
        (folder / "train.py").write_text(TRAIN)
        (folder / "secret").touch(mode=0o600)
        (folder / "secret").write_text(secrets.token_hex(32))

    def on(self, host: int, words: list[str]) -> list[str]:
        return words if self._network is None else self._network.command(host, words)

    def start(self, host: int, most: int) -> None:
        conf = f"last_call_timeout=1,join_timeout=120,lease={LEASE:g}"
        words = [*RALLY, "--nnodes", f"2:{most}", "--nproc-per-node", "1", "--rdzv-conf", conf]
        words += ["--rdzv-endpoint", f"{self.addr}:{self.port}", "--max-restarts", "10"]
        words += ["--secret-file", str(self.folder / "secret"), "--shutdown-timeout", "2"]
        env = {**os.environ, "BENCH_HOST": str(host), "OMP_NUM_THREADS": "1"}
        env |= {"TMPDIR": str(self.folder), "TORCH_CPP_LOG_LEVEL": "FATAL"}
        if self._network is not None:
            env["GLOO_SOCKET_IFNAME"] = "eth0"
        command = self.on(host, [*words, str(self.folder / "train.py"), str(self.folder)])
        with (self.folder / f"said-{host}").open("ab") as said:
            self.hosts[host] = subprocess.Popen(command, env=env, stdout=said, stderr=said)

    def notes(self) -> list[dict[str, Any]]:
        path = self.folder / "notes"
        return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []

    def formed(self, world: int, after: int = -1) -> list[dict[str, Any]] | None:
        """The members of the latest generation after ``after`` in which ``world`` members have met."""
        found: dict[int, list[dict[str, Any]]] = {}
        for each in self.notes():
            if each.get("world") == world and each["generation"] > after:
                found.setdefault(each["generation"], []).append(each)
        whole = [generation for generation, members in found.items() if len(members) == world]
        return found[max(whole)] if whole else None

    def wait_formed(self, world: int, after: int) -> int:
        """Wait for a generation after ``after`` in which ``world`` members meet. Returns its number."""
        members = self.wait(f"a round after {after}", lambda: self.formed(world, after))
        generation: int = members[0]["generation"]
        return generation

    def wait(self, what: str, condition: Callable[[], Any]) -> Any:
        deadline = time.monotonic() + GIVE_UP
        while not (result := condition()):
            if time.monotonic() > deadline:
                raise TimeoutError(f"{what}: not within {GIVE_UP:g} s\n{self.said()}")
            time.sleep(0.05)
        return result

    def said(self) -> str:
        paths = sorted(self.folder.glob("said-*"))
        return "\n".join(f"-- {path.name}\n{path.read_text()[-4000:]}" for path in paths)

    def close(self) -> None:
        for process in self.hosts.values():
            if process.poll() is None:
                process.send_signal(signal.SIGINT)
        for process in self.hosts.values():
            with suppress(subprocess.TimeoutExpired):
                process.wait(20)
            if process.poll() is None:
                process.kill()
                process.wait()


def run(
    folder: Path, network: Network | None, hosts: int, operations: int, seed: int
) -> dict[str, Any]:
    job = Attacked(folder, network)
    try:
        for host in range(hosts):
            job.start(host, hosts)
        members = job.wait("the first round", lambda: job.formed(hosts))
        began = time.monotonic()
        words = [sys.executable, __file__, "--attack", job.addr, str(job.port)]
        words += ["--operations", str(operations), "--seed", str(seed)]
        stranger = subprocess.Popen(job.on(hosts, words), stdout=subprocess.PIPE, text=True)
        assert stranger.stdout is not None
        killed = 0
        after = members[0]["generation"]
        told: dict[str, Any] = {}
        for line in stranger.stdout:
            told = json.loads(line)
            if killed == 0 and told["at"] >= operations // 3:
                killed = 1
                members = job.formed(hosts) or members  # the attack may have cost a round
                after = members[0]["generation"]
                with suppress(ProcessLookupError):
                    os.kill(max(members, key=lambda each: each["rank"])["pid"], signal.SIGKILL)
            elif killed == 1 and told["at"] >= 2 * operations // 3 and hosts > 2:
                killed = 2
                job.wait_formed(hosts, after)
                job.hosts[hosts - 1].kill()
                job.hosts[hosts - 1].wait()
                # No round formed so far counts: there may have been one more than expected.
                after = max(each["generation"] for each in job.notes())
                job.start(hosts - 1, hosts)
        if stranger.wait() != 0:
            raise RuntimeError(f"the stranger ended with {stranger.returncode}\n{job.said()}")
        seconds = time.monotonic() - began
        job.wait_formed(hosts, after)
        (folder / "finish").touch()
        codes = [process.wait(GIVE_UP) for process in job.hosts.values()]
        notes = job.notes()
        wrong = sum(each.get("right") is False for each in notes)
        rounds = {each["generation"] for each in notes if "generation" in each}
        for generation in rounds:
            ranks = [each["rank"] for each in notes if each.get("generation") == generation]
            wrong += len(ranks) != len(set(ranks))
        if any(codes) or wrong:
            raise RuntimeError(f"exit codes {codes}, {wrong} wrong rounds\n{job.said()}")
        return {
            "hosts": hosts,
            "namespaces": network is not None,
            "operations": told["at"],
            "by kind": told["done"],
            "keys seen": told["keys"],
            "seconds": round(seconds, 1),
            "rounds": len(rounds),
            "wrong rounds": wrong,
            "exit codes": codes,
        }
    finally:
        job.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--hosts", type=int, default=4)
    parser.add_argument("--operations", type=int, default=10_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--here", action="store_true", help="without namespaces: all processes on this host"
    )
    parser.add_argument("--attack", nargs=2, metavar=("HOST", "PORT"), help=argparse.SUPPRESS)
    parser.add_argument("--output", type=Path)
    given = parser.parse_args()
    if given.attack:
        attack(given.attack[0], int(given.attack[1]), given.operations, given.seed)
        return
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # namespaces are removed in any case
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="rally-attack-")))
        network = None
        if available() and not given.here:
            network = stack.enter_context(Network(given.hosts + 1))
        found = run(folder, network, given.hosts, given.operations, given.seed)
    publish({"machine": machine(), "attack": found}, given.output)


if __name__ == "__main__":
    main()
