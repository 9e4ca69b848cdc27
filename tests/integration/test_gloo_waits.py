"""Which Gloo ``Work`` objects can be waited for in slices: a session gives them up if Gloo does not notice a lost member."""

from __future__ import annotations

import json
import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path

from pace import pace
from rallypoint.elastic import torch_private
from supervisors import Popen


SCRIPT = """
import json, sys, time
from datetime import timedelta
import torch, torch.distributed as dist

rank, path = int(sys.argv[1]), sys.argv[2]
dist.init_process_group("gloo", init_method=f"file://{path}", rank=rank, world_size=2)
# What cannot be waited for in slices is waited for that long.
dist.group.WORLD._get_backend(torch.device("cpu"))._set_default_timeout(timedelta(seconds=3))
if rank == 1:
    sys.stdin.read()  # the other one is not answered
    raise SystemExit
group, x, two = dist.group.WORLD, torch.ones(4), [torch.zeros(4) for _ in range(2)]
calls = {
    "allreduce": lambda: group.allreduce([x]),
    "allreduce_coalesced": lambda: group.allreduce_coalesced([x]),
    "broadcast": lambda: group.broadcast([x], dist.BroadcastOptions()),
    "barrier": group.barrier,
    "reduce": lambda: group.reduce([x], dist.ReduceOptions()),
    "allgather": lambda: group.allgather([two], [x]),
    "_allgather_base": lambda: group._allgather_base(torch.zeros(8), x),
    "all_gather_single": lambda: group.all_gather_single(torch.zeros(8), x),
    "allgather_into_tensor_coalesced": lambda: group.allgather_into_tensor_coalesced([torch.zeros(8)], [x]),
    "all_gather_single_coalesced": lambda: group.all_gather_single_coalesced([torch.zeros(8)], [x]),
    "allgather_coalesced": lambda: group.allgather_coalesced([[torch.zeros(4)], [torch.zeros(4)]], [x]),
    "gather": lambda: group.gather([two], [x], dist.GatherOptions()),
    "scatter": lambda: group.scatter([x], [two], dist.ScatterOptions()),
    "alltoall": lambda: group.alltoall(two, [torch.ones(4) for _ in range(2)]),
    "alltoall_base": lambda: group.alltoall_base(torch.zeros(4), x, [], []),
    "all_to_all_single": lambda: group.all_to_all_single(torch.zeros(4), x, [], []),
    "reduce_scatter_single": lambda: group.reduce_scatter_single(torch.zeros(2), x),
}
took = {}
for name in sys.argv[3:]:
    work = calls[name]()
    began = time.monotonic()
    try:
        work.wait(timedelta(seconds=0.1))
    except RuntimeError:
        took[name] = time.monotonic() - began
print(json.dumps(took))
"""


def test_all_but_a_reduce_scatter_end_their_wait_in_time(tmp_path: Path) -> None:
    scatters = torch_private.REDUCE_SCATTERS
    names = [
        name
        for name in torch_private.COLLECTIVES
        if name not in {*scatters, torch_private.MONITORED_BARRIER}
    ]
    words = [str(tmp_path / "store"), *names, "reduce_scatter_single"]
    with ExitStack() as stack:
        two = [
            stack.enter_context(
                Popen(
                    [sys.executable, "-c", SCRIPT, str(rank), *words],
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    text=True,
                )
            )
            for rank in range(2)
        ]
        stack.callback(lambda: [each.kill() for each in two])
        assert two[0].stdout is not None
        took = json.loads(two[0].stdout.readline())
    assert all(took[name] < 0.1 + 0.5 * pace() for name in names), took
    # If this were in time too, a session would leave it as it is (reduce_scatter.py).
    assert took["reduce_scatter_single"] > 1.0, took
