"""The copy that lets a session undo a step that communicates after changing parameters, compared with Adam's step; prints JSON.

    python bench/step_copies.py --quick
    python bench/step_copies.py --output bench/results/step_copies.json

In one process on one core: 25 million parameters in 25 tensors, and 1.5 million in 1,500. Copies and steps take turns. The first
copy, which has to allocate its memory, is reported separately.
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path
from typing import Any

import torch
from jobs import machine, publish, spread
from torch import nn

from rallypoint.elastic.state.copied import num_bytes
from rallypoint.elastic.state.objects import Objects


MODELS = {"25 M parameters, 25 tensors": (25, 1000), "1.5 M parameters, 1,500 tensors": (1500, 32)}


def measure(tensors: int, width: int, turns: int) -> dict[str, Any]:
    net = nn.ParameterList(nn.Parameter(torch.randn(width, width)) for _ in range(tensors))
    optimizer = torch.optim.Adam(net.parameters())
    for each in net:
        each.grad = torch.randn_like(each)
    optimizer.step()
    objects = Objects([net, optimizer])
    began = time.perf_counter()
    saved = objects.save()
    first = time.perf_counter() - began
    copies, steps = [], []
    for _ in range(turns):
        began = time.perf_counter()
        saved = objects.save(saved)
        copied = time.perf_counter()
        optimizer.step()
        copies.append(1e3 * (copied - began))
        steps.append(1e3 * (time.perf_counter() - copied))
    return {
        "mb": round(num_bytes(saved).total() / 1e6, 1),
        "first_copy_ms": round(1e3 * first, 1),
        "copy_ms": spread(copies, 1),
        "adam_ms": spread(steps, 1),
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="few turns")
    parser.add_argument("--output", type=Path, help="also write the JSON to this file")
    options = parser.parse_args()
    torch.set_num_threads(1)
    turns = 3 if options.quick else 50
    result: dict[str, Any] = {"benchmark": "step_copies", "machine": machine()}
    result["models"] = {name: measure(*shape, turns) for name, shape in MODELS.items()}
    publish(result, options.output)
    return 0


if __name__ == "__main__":
    sys.exit(main())
