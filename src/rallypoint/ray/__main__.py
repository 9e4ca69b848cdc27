"""``python -m rallypoint.ray``: what `rally submit ray` runs on the cluster."""

from __future__ import annotations

import logging
import sys
from collections.abc import Sequence

from rallypoint.errors import ConfigError, RallyError, WorkersFailed

from .job_words import USAGE, read


def main(words: Sequence[str]) -> int:
    """Run the job. Returns the same exit code as `rally run`."""
    if not words or words[0] in {"-h", "--help"}:
        print(USAGE)  # noqa: T201
        return 0 if words else 2
    logging.basicConfig(format="rally: %(message)s")
    try:
        job = read(words)
        from rallypoint.ray import RallyTrainer

        RallyTrainer(
            job.target,
            num_nodes=job.num_nodes,
            workers_per_node=job.workers,
            resources_per_node=job.resources,
            flags=job.flags,
        ).fit()
    except WorkersFailed as error:
        print(error, file=sys.stderr, flush=True)  # noqa: T201
        return error.report.exit_code
    except RallyError as error:
        print(f"rally: {error}", file=sys.stderr, flush=True)  # noqa: T201
        return 2 if isinstance(error, ConfigError) else 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
