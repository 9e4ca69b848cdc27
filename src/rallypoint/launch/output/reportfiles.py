"""Failures written to disk: our report, and error files in torchelastic's format."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from rallypoint._core import env as environment, private

from .failure import WorkerFailure, torchelastic_record
from .report import FailureReport


def write_error_files(
    folders: Mapping[int, Path | None], failures: Sequence[WorkerFailure]
) -> None:
    """Write ``error.json`` for each failed worker that did not write its own.

    Args:
        folders: the folders of the workers' output, by local rank.
        failures: the failures of some of these workers.
    """
    for failure in failures:
        folder = folders[failure.local_rank]
        if folder is not None and not (folder / "error.json").exists():
            _write(folder / "error.json", torchelastic_record(failure))


def write_report(folder: Path | None, report: FailureReport) -> FailureReport:
    """Write ``report.json`` to the run's folder, and the root cause to our own ``TORCHELASTIC_ERROR_FILE``.

    A full disk must not hide the failure: files that cannot be written are skipped.

    Returns:
        The report, with ``report_file`` set if it was written.
    """
    root = report.root_cause
    outer = environment.get("TORCHELASTIC_ERROR_FILE")
    if outer and root is not None:
        _write(Path(outer), torchelastic_record(root))
    if folder is None:
        return report
    path = folder / "report.json"
    written = _write(path, report.to_json())
    return replace(report, report_file=str(path)) if written else report


def _write(path: Path, data: object) -> bool:
    try:
        private.make_folder(path.parent, exist_ok=True)
        private.write_text(path, json.dumps(data, indent=1) + "\n")
    except OSError:
        return False
    return True
