"""Plot the results of bench/launch.py: python bench/plot_launch.py bench/results/launch.json OUT.png"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any


COLOURS = {
    "import torch": "#9aa0a6",
    "rally": "#1b6ca8",
    "rally exec": "#7fb2d6",
    "torchrun": "#e07b39",
    "torchrun, work-around": "#f0b48a",
}


def plot(result: dict[str, Any], path: Path) -> None:
    """Four panels: start, restart, memory, response times of the command line."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt

    plt.rcParams.update(
        {"font.size": 9, "axes.titlesize": 10, "axes.spines.top": False, "axes.spines.right": False}
    )
    figure, ((start, restart), (memory, lines)) = plt.subplots(
        2, 2, figsize=(11, 7.5), layout="constrained"
    )
    facts = result["machine"]
    figure.suptitle(
        f"rally run beside torchrun   ({facts['cores']} cores, {facts['cpu']}, torch {facts['torch']};"
        " medians, lines show the range)",
        fontsize=10,
    )

    start.set_title("from the command to its exit, one all-reduce between (s)")
    imported = result["import_torch_s"]
    rows = [("python -c 'import torch'", "import torch", imported)]
    rows += [
        (f"{row['launcher']}, {row['workers']} workers", row["launcher"], row["to_exit_s"])
        for row in sorted(result["start"], key=lambda row: row["workers"])
    ]
    _bars(start, rows)
    start.axvline(imported["median"], color=COLOURS["import torch"], lw=0.8, ls=":")

    workers = result["restart"]["workers"]
    restart.set_title(f"{workers} workers: death of one to the next all-reduce (s)")
    rows = []
    for name, row in result["restart"].items():
        if isinstance(row, dict):
            tries = f"first attempt {row['first_attempt_succeeded']}/{row['repeats']}"
            rows.append((f"{name}\n{tries}", name, row["death_to_next_all_reduce_s"]))
    _bars(restart, rows)

    memory.set_title(f"memory of a job of {result['memory']['workers']} workers (MiB)")
    rows = [
        (f"{launcher}: {label}", launcher, result["memory"][launcher][field])
        for field, label in (
            ("worker_uss_mib", "a worker's own (USS)"),
            ("worker_pss_mib", "with its share (PSS)"),
            ("job_pss_mib", "the whole job (PSS)"),
        )
        for launcher in ("rally", "torchrun")
        if result["memory"].get(launcher)
    ]
    _bars(memory, rows, digits=0)

    lines.set_title("answers of the command line (s)")
    rows = [
        (name, name.split()[0].rstrip(","), result["command_line"][f"{name}_s"])
        for name in (
            *("rally --help", "rally run --help", "torchrun --help"),
            *("rally, a typo", "torchrun, a typo"),
        )
    ]
    _bars(lines, rows, digits=2)

    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=150)
    plt.close(figure)


def _bars(axes: Any, rows: list[tuple[str, str, dict[str, Any]]], digits: int = 2) -> None:
    for place, (_, name, figures) in enumerate(rows):
        middle = figures["median"]
        if middle is None:
            axes.text(0, place, " never", va="center")
            continue
        low, high = middle - figures["min"], figures["max"] - middle
        axes.barh(place, middle, color=COLOURS.get(name, "#bbbbbb"), height=0.72)
        axes.errorbar(middle, place, xerr=[[low], [high]], color="#333333", lw=0.9, capsize=2)
        axes.text(figures["max"], place, f"  {middle:.{digits}f}", va="center")
    axes.set_yticks(range(len(rows)), [label for label, *_ in rows])
    axes.invert_yaxis()
    axes.margins(x=0.14)
    axes.set_xlim(left=0)


if __name__ == "__main__":
    if len(sys.argv) != 3:
        raise SystemExit(__doc__)
    plot(json.loads(Path(sys.argv[1]).read_text()), Path(sys.argv[2]))
