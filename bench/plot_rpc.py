"""Plot the results of bench/rpc.py: python bench/plot_rpc.py rpc.json OUT.png"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any


# Rival -> name, colour.
BARS = {
    "rallypoint": ("rallypoint.rpc", "#1b6ca8"),
    "tensorpipe": ("torch.distributed.rpc (TensorPipe)", "#e07b39"),
}
PANELS = {
    "us": "a call: median (bar) and 99th percentile (line), µs",
    "calls/s": "calls per second",
    "GB/s": "tensors, GB/s",
    "s": "a group begins and ends, s",
}


def plot(result: dict[str, Any], path: Path) -> None:
    """One panel for each unit, bars in pairs, on a logarithmic axis."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt

    plt.rcParams.update(
        {"font.size": 9, "axes.titlesize": 10, "axes.spines.top": False, "axes.spines.right": False}
    )
    panels = {unit: [r for r in result["rows"] if r["unit"] == unit] for unit in PANELS}
    panels = {unit: rows for unit, rows in panels.items() if rows}
    # Two columns of panels, each as tall as its rows need.
    left, right = ["us", "s"], ["calls/s", "GB/s"]
    columns = [[unit for unit in side if unit in panels] for side in (left, right)]
    columns = [column for column in columns if column]
    heights = [[len(panels[unit]) + 1.5 for unit in column] for column in columns]
    figure = plt.figure(figsize=(13, 1 + 0.42 * max(map(sum, heights))), layout="constrained")
    facts = result["machine"]
    figure.suptitle(
        f"calls between processes of one machine   ({facts['cores']} cores, {facts['cpu']}, torch"
        f" {facts['torch']}; medians)",
        fontsize=10,
    )
    sides = figure.subfigures(1, len(columns), squeeze=False)[0]
    for side, column, sizes in zip(sides, columns, heights, strict=True):
        places = side.subplots(len(column), 1, squeeze=False, height_ratios=sizes)[:, 0]
        for axes, unit in zip(places, column, strict=True):
            _bars(axes, panels[unit])
            axes.set_title(PANELS[unit], loc="left")
    handles = [mpl.patches.Patch(color=colour, label=label) for label, colour in BARS.values()]
    figure.legend(handles=handles, loc="outside lower center", ncols=2, frameon=False)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=150)
    plt.close(figure)


def _bars(axes: Any, rows: list[dict[str, Any]]) -> None:
    axes.set_xscale("log")
    values = [
        figure[key]
        for row in rows
        for figure in (row[rival] for rival in BARS)
        for key in ("median", "p99")
        if figure.get(key)
    ]
    least, most = (min(values), max(values)) if values else (1, 10)
    axes.set_xlim(least / 3, most * 6)
    for index, row in enumerate(rows):
        for offset, (rival, (_, colour)) in zip((-0.2, 0.2), BARS.items(), strict=True):
            figure, at = row[rival], index + offset
            if not figure.get("median"):
                axes.text(least / 2.8, at, "failed", va="center", color=colour, fontsize=8)
                continue
            axes.barh(at, figure["median"], height=0.36, color=colour)
            end = figure.get("p99", figure["median"])
            axes.plot([figure["median"], end], [at, at], color=colour, lw=1.2, marker="|")
            text = _number(figure["median"])
            if "p99" in figure:
                text += f", {_number(end)}"
            if row.get("members_before"):
                text += f"  ({row['members_before'][rival]} members)"
            axes.text(max(end, figure["median"]) * 1.08, at, text, va="center", fontsize=8)
    axes.set_yticks(range(len(rows)), [_label(row) for row in rows])
    axes.set_ylim(len(rows) - 0.4, -0.6)
    axes.minorticks_off()
    axes.grid(axis="x", color="#e5e5e5", lw=0.6)
    axes.set_axisbelow(True)


def _number(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def _label(row: dict[str, Any]) -> str:
    return row["what"] + (", TCP" if row["transport"] == "tcp" else "")


if __name__ == "__main__":
    if len(sys.argv) != 3:
        raise SystemExit(__doc__)
    plot(json.loads(Path(sys.argv[1]).read_text()), Path(sys.argv[2]))
