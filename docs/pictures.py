"""Draws docs/terminal.svg: a small job as it looks on a terminal. `make pictures`.

The job is real, and so is what it prints. Only the name of its folder, which is a temporary one, and that of the host are not.
"""

from __future__ import annotations

import fcntl
import io
import os
import re
import struct
import subprocess
import sys
import tempfile
import termios
from pathlib import Path

from rich.console import Console
from rich.terminal_theme import SVG_EXPORT_THEME
from rich.text import Text


PICTURE = Path(__file__).with_name("terminal.svg")
ROWS, COLUMNS = 40, 96
SHOWN_FOLDER = "/home/ada"
FONTS = "ui-monospace, Menlo, Consolas, 'DejaVu Sans Mono', 'Liberation Mono', monospace"

COMMAND = ("rally", "run", "--nproc-per-node", "2", "--max-losses", "1", "train.py")
# Rank 1 is killed in step 30, and has a batch in step 70 that the model cannot take.
SCRIPT = """\
import os
import signal

from rallypoint import elastic
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel


def check(batch):
    if batch.shape[1] != 8:
        raise ValueError(f"a batch has {batch.shape[1]} features, the model takes 8")


dist.init_process_group("gloo")
rank = dist.get_rank()
torch.manual_seed(rank)
model = DistributedDataParallel(torch.nn.Linear(8, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
batches = [torch.randn(32, 8) for _ in range(100)]
if rank == 1:
    batches[70] = torch.randn(32, 7)

with elastic.session(model, optimizer) as session:
    for batch in session.batches(batches):
        with session.step():
            if session.position == 30 and rank == 1 and not os.path.exists("killed"):
                open("killed", "w").close()
                os.kill(os.getpid(), signal.SIGKILL)
            check(batch)
            loss = (model(batch) - batch.sum(1, keepdim=True)).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        if rank == 0 and session.position % 20 == 0:
            print(f"step {session.position}: loss {loss.item():.4f}", flush=True)
"""


def on_a_terminal(command: list[str], folder: Path) -> str:
    """Run a command on a terminal of its own. Returns what it shows, with codes for colours."""
    ours, theirs = os.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", ROWS, COLUMNS, 0, 0))
    with subprocess.Popen(
        command,
        cwd=folder,
        stdin=subprocess.DEVNULL,
        stdout=theirs,
        stderr=theirs,
        start_new_session=True,
    ):
        os.close(theirs)
        shown = b""
        try:
            while data := os.read(ours, 65536):
                shown += data
        except OSError:
            pass  # EIO: the last writer is gone
        os.close(ours)
    return shown.decode().replace("\r\n", "\n")


def drawn(shown: str) -> str:
    """The command and what it shows, as SVG with the fonts of the one who looks at it."""
    console = Console(record=True, width=COLUMNS, file=io.StringIO(), force_terminal=True)
    console.print(Text.assemble(("$ ", "bold green"), (" ".join(COMMAND), "bold")))
    console.print(Text.from_ansi(shown))
    svg = console.export_svg(title="", theme=SVG_EXPORT_THEME, unique_id="terminal")
    # No network: a page that shows the picture as an image does not load fonts for it.
    svg = re.sub(r"\s*@font-face \{.*?\}", "", svg, flags=re.DOTALL)
    return svg.replace("Fira Code, monospace", FONTS)


def main() -> None:
    """Run the job and draw it."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name).resolve()
        (folder / "train.py").write_text(SCRIPT)
        logs = folder / "tmp"
        logs.mkdir()
        settings = [f"TMPDIR={logs}", "TERM=xterm-256color", "RALLY_HOST_NAME=gpu-07"]
        # A bar would be drawn over the last row.
        settings += ["PET_PROGRESS=lines"]
        rally = Path(sys.executable).with_name(COMMAND[0])
        shown = on_a_terminal(
            ["env", "-u", "NO_COLOR", *settings, str(rally), *COMMAND[1:]], folder
        )
    PICTURE.write_text(drawn(shown.replace(str(folder), SHOWN_FOLDER)))


if __name__ == "__main__":
    main()
