"""Plot the results of bench/rendezvous.py: python bench/plot_rendezvous.py rendezvous.json OUT.png"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any


# (rival, store) -> name, colour.
LINES = {
    ("rally", "tcpstore"): ("rallypoint, TCPStore", "#1b6ca8"),
    ("torch", "tcpstore"): ("torch c10d, TCPStore", "#e07b39"),
    ("rally", "etcd"): ("rallypoint, etcd", "#5aa469"),
    ("rally", "file"): ("rallypoint, shared folder", "#9a7fb5"),
}


def plot(result: dict[str, Any], path: Path) -> None:
    """Three panels with logarithmic axes: time, operations and bytes per node, by number of nodes."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt

    plt.rcParams.update(
        {"font.size": 9, "axes.titlesize": 10, "axes.spines.top": False, "axes.spines.right": False}
    )
    figure, (times, operations, sizes) = plt.subplots(
        1, 3, figsize=(13, 4.4), layout="constrained", width_ratios=(1.5, 1, 1)
    )
    facts = result["machine"]
    figure.suptitle(
        f"one rendezvous of N nodes, all on one machine   ({facts['cores']} cores, {facts['cpu']}, torch"
        f" {facts['torch']}; medians, bars show the range)",
        fontsize=10,
    )
    _lines(times, result, "to_last_node_s")
    limits = [row for row in result["targets"] if row["what"].endswith("to the last one, s")]
    places = [(int(row["what"].split()[0]), row["limit"]) for row in limits]
    times.plot(*zip(*places, strict=True), color="#888888", ls=":", marker="_", label="target")
    stopped = [r for r in result["rounds"] if r["rival"] == "torch" and r["first"]["failed"]]
    for row in stopped:
        given_up = result["given_up_after_s"]
        times.plot(row["nodes"], given_up, "x", color=LINES["torch", "tcpstore"][1])
        times.annotate(
            f"torch: none within {given_up:g} s",
            (row["nodes"], given_up),
            textcoords="offset points",
            xytext=(6, -3),
        )
    times.set_title("from the start until the last node has its rank (s)")
    times.legend(frameon=False)

    _lines(operations, result, "operations_per_node")
    operations.set_title("operations of a node (mean)")
    _lines(sizes, result, "bytes_per_node", 1024)
    sizes.set_title("keys and values of a node (KiB, mean)")

    for axes in (times, operations, sizes):
        axes.set_xscale("log", base=2)
        axes.set_yscale("log")
        nodes = sorted({row["nodes"] for row in result["rounds"]})
        axes.set_xticks(nodes, [str(each) for each in nodes], rotation=45)
        axes.minorticks_off()
        axes.set_xlabel("nodes")
        axes.grid(color="#e5e5e5", lw=0.6)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=150)
    plt.close(figure)


def _lines(axes: Any, result: dict[str, Any], name: str, unit: float = 1) -> None:
    for key, (label, colour) in LINES.items():
        rows = [r for r in result["rounds"] if (r["rival"], r["backend"]) == key]
        found = [(r["nodes"], r["first"][name]) for r in rows if r["first"][name]["n"]]
        if not found:
            continue
        nodes = [each for each, _ in found]
        middles = [figures["median"] / unit for _, figures in found]
        below = [(figures["median"] - figures["min"]) / unit for _, figures in found]
        above = [(figures["max"] - figures["median"]) / unit for _, figures in found]
        axes.errorbar(
            nodes, middles, yerr=[below, above], label=label, color=colour, marker="o", ms=4, lw=1.4
        )


if __name__ == "__main__":
    if len(sys.argv) != 3:
        raise SystemExit(__doc__)
    plot(json.loads(Path(sys.argv[1]).read_text()), Path(sys.argv[2]))
