"""What ``rally run --help`` prints."""

from __future__ import annotations

from collections.abc import Sequence

from rallypoint.rendezvous.backend import Backend
from rallypoint.rendezvous.defaults import COMMON_OPTIONS

from .flags import FLAGS, OTHER


def help_text(backends: Sequence[Backend] = (), width: int = 100) -> str:
    """What ``rally run --help`` prints.

    Args:
        backends: the rendezvous backends to list.
        width: the screen's width in characters.
    """
    import textwrap

    def entry(head: str, text: str) -> list[str]:
        body = textwrap.wrap(text, width - 34)
        first = [f"{head:<33} {body[0]}"] if len(head) < 33 else [head]
        return [*first, *(" " * 34 + line for line in body[len(head) < 33 :])]

    lines = [
        "usage: rally run [flags] script.py [its arguments]",
        "       rally run [flags] -m package.module [its arguments]",
        "       rally run [flags] --no-python program [its arguments]",
        "",
        "Start a distributed PyTorch job on this machine, or this machine's part of one. If it fails, report",
        "why. Command lines of torchrun work unchanged.",
        "",
        "  rally run --nproc-per-node 4 train.py --epochs 3",
        "  rally run --nproc-per-node gpu --max-restarts 3 train.py",
        "  rally run --nnodes 2 --rdzv-endpoint node0 --nproc-per-node 8 train.py   (on both nodes)",
    ]
    for group in dict.fromkeys(flag.group for flag in FLAGS):
        lines += ["", f"{group}:"]
        for flag in FLAGS:
            if flag.group == group:
                short = f"{flag.short}, " if flag.short else ""
                head = f"  {short}{flag.name} {flag.metavar}".rstrip()
                default = f" [{flag.default}]" if flag.default and flag.group != OTHER else ""
                lines += entry(head, flag.help + default)
    lines += ["", "--rdzv-conf, with any backend:"]
    for option in COMMON_OPTIONS:
        lines += entry(f"  {option.name}=", option.help)
    for backend in backends:
        if backend.one_process:
            continue
        also = f" (also {', '.join(backend.aliases)})" if backend.aliases else ""
        lines += ["", f"--rdzv-backend {backend.name}{also}: {backend.help}"]
        lines += [f"  --rdzv-endpoint {scheme.example}" for scheme in backend.schemes]
        for option in backend.options:
            lines += entry(f"  {option.name}=", option.help)
    lines += [
        "",
        "Flags may be written --a-b or --a_b, and shortened as long as they are unambiguous. Without a flag,",
        "PET_FLAG_NAME gives its value (PET_NPROC_PER_NODE=4), as with torchrun. Nodes and ranks are",
        "detected with Slurm, Open MPI, MPICH, and clusters that set MASTER_ADDR, RANK and WORLD_SIZE.",
        "Exit code: that of the worker that failed first; 128+N if signal N ended it; 2 if the command line",
        "is wrong.",
    ]
    return "\n".join(lines)
