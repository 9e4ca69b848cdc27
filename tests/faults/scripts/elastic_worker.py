"""A worker of an elastic job: collectives in a loop, a checkpoint after each, notes for the test.

In ``ELASTIC_FOLDER``: ``notes.jsonl`` (one line for each thing noted), ``checkpoint.json``, and files by which
the test gives orders: ``finish`` ends all workers, ``finish-NODE`` those of one node, ``fail-NODE`` fails one there, once.
"""

import json
import os
import signal
import socket
import sys
import threading
import time
from pathlib import Path

import torch
import torch.distributed as dist


FOLDER = Path(os.environ["ELASTIC_FOLDER"])
NODE = os.environ["ELASTIC_NODE"]
GENERATION = int(os.environ["RALLY_GENERATION"])
PAUSE = float(os.environ.get("ELASTIC_PAUSE", "0.02"))


def note(what, **more):
    line = json.dumps(
        {
            "what": what,
            "generation": GENERATION,
            "rank": int(os.environ["RANK"]),
            "node": NODE,
            "pid": os.getpid(),
            "at": time.monotonic(),
            **more,
        }
    )
    # One write to a file opened for appending: lines of several processes do not mix.
    fd = os.open(FOLDER / "notes.jsonl", os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    os.write(fd, line.encode() + b"\n")
    os.close(fd)


def note_signals():
    """Note SIGTERM when it arrives, even while the main thread is inside a collective."""
    ours, theirs = socket.socketpair()
    theirs.setblocking(False)
    signal.signal(signal.SIGTERM, lambda *_: None)  # the thread below ends us
    signal.set_wakeup_fd(theirs.fileno(), warn_on_full_buffer=False)

    def listen():
        while data := ours.recv(1):
            if data[0] != signal.SIGTERM:
                continue  # rally asks a worker what it is handling with a signal of its own
            note("signal", number=data[0])
            time.sleep(float(os.environ.get("ELASTIC_SAVES", "0")))  # a last checkpoint
            os._exit(143)

    threading.Thread(target=listen, daemon=True).start()
    return theirs


def read_checkpoint():
    try:
        return json.loads((FOLDER / "checkpoint.json").read_text())
    except FileNotFoundError:
        return {"step": 0, "total": 0}


def write_checkpoint(state):
    fresh = FOLDER / f"checkpoint.{os.getpid()}"
    fresh.write_text(json.dumps(state))
    fresh.replace(FOLDER / "checkpoint.json")


def obey():
    """Carry out the test's orders to this node alone."""
    if (FOLDER / f"finish-{NODE}").exists():
        note("finished")
        dist.destroy_process_group()
        sys.exit(0)
    fail = FOLDER / f"fail-{NODE}"
    if fail.exists():
        fail.unlink(missing_ok=True)
        raise ValueError("a bad batch")


def main():
    held = note_signals()
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    # All resume from what rank 0 has read: another rank might read what rank 0 has not seen yet.
    states = [read_checkpoint() if rank == 0 else None]
    dist.broadcast_object_list(states)
    state = states[0]
    dist.all_reduce(torch.ones(1))
    note(
        "generation",
        world=world,
        restarts=int(os.environ["TORCHELASTIC_RESTART_COUNT"]),
        resumed=state["step"],
        group_rank=int(os.environ["GROUP_RANK"]),
        master=os.environ["MASTER_ADDR"],
        supervisor=os.getppid(),
    )
    while os.environ.get("ELASTIC_APART"):  # each on its own: nobody notices when another exits
        obey()
        if (FOLDER / "finish").exists():
            break
        time.sleep(PAUSE)
    else:
        while True:
            obey()
            wishes = torch.tensor([1.0, float(rank == 0 and (FOLDER / "finish").exists())])
            dist.all_reduce(wishes)
            assert wishes[0] == world, wishes
            state = {"step": state["step"] + 1, "total": state["total"] + state["step"] + 1}
            # All ranks took part in the collective, so all have done this step.
            if rank == 0:
                write_checkpoint(state)
                note("step", step=state["step"])
            if wishes[1]:
                break
            time.sleep(PAUSE)
        assert state["total"] == state["step"] * (state["step"] + 1) // 2, state
    note("finished")
    dist.destroy_process_group()
    held.close()


main()
