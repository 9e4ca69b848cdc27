"""Findings as a table for people. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from .judgement import Finding, Level


_MARKS = {Level.PROBLEM: "PROBLEM", Level.REMARK: "remark", Level.FINE: "fine"}


def text(findings: Sequence[Finding], *, briefly: bool = False) -> str:
    """A row for each finding, with the advice below it; the worst comes first.

    Args:
        findings: in order.
        briefly: without those that are fine.
    """
    shown = [each for each in findings if not (briefly and each.level is Level.FINE)]
    rows = [(_MARKS[each.level], each.what, each.where) for each in shown]
    widths = [max((len(row[column]) for row in rows), default=0) for column in range(3)]
    lines = []
    for row, each in zip(rows, shown, strict=True):
        cells = [cell.ljust(width) for cell, width in zip(row, widths, strict=True) if width]
        lines.append("  ".join([*cells, each.found]))
        if each.advice:
            lines.append(" " * (sum(widths) + 2 * sum(map(bool, widths))) + f"→ {each.advice}")
    return "\n".join(lines)


def verdict(findings: Sequence[Finding]) -> str:
    """The last line: how many problems and remarks there are."""
    problems = sum(each.level is Level.PROBLEM for each in findings)
    remarks = sum(each.level is Level.REMARK for each in findings)
    told = f"{problems or 'no'} problem{'s' * (problems != 1)}"
    return told + (f", {remarks} remark{'s' * (remarks != 1)}" if remarks else "")
