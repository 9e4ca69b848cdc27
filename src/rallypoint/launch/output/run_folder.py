"""The folder of a run: ``<log-dir>/<run-id>_<random>/attempt_<generation>/<local-rank>/{stdout,stderr}.log, error.json``.

The layout is torchrun's. A folder is never used twice, and never deleted once something is in it.
"""

from __future__ import annotations

import os
import re
import secrets
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from rallypoint._core import limits, private
from rallypoint.errors import ConfigError, LaunchError
from rallypoint.launch.config import LogConfig


class RunFolder:
    """The folder of one run. Made on construction; with ``/dev/null`` there is none.

    Raises:
        ConfigError: the folder cannot be made.
    """

    def __init__(self, config: LogConfig, run_id: str) -> None:
        self._keep = config.folder is not None or config.redirects.any() or config.tee.any()
        self.path: Path | None = None
        # Only we know where it is, and the user wants what will be in it.
        self.is_news = config.folder is None and self._keep
        if config.folder == os.devnull:
            return
        safe = re.sub(r"[^A-Za-z0-9._-]+", "-", run_id)[:64] or "run"
        if config.folder is None:
            try:
                self.path = Path(tempfile.mkdtemp(prefix=f"rally_{safe[:8]}_"))
            except OSError as error:
                raise ConfigError(
                    "TMPDIR",
                    None,
                    f"no temporary folder can be made: {error.strerror}",
                    "set it, or --log-dir, to a folder you may write to",
                ) from None
            return
        base = Path(config.folder).absolute()
        path = base / f"{safe}_{secrets.token_hex(4)}"
        try:
            private.make_folder(path)
        except OSError as error:
            raise ConfigError(
                "--log-dir",
                config.folder,
                f"cannot make a folder there: {error.strerror}",
                "name a folder you may write to",
            ) from None
        self.path = path

    def generation(self, generation: int) -> Path | None:
        """The folder of one generation, made new.

        Raises:
            LaunchError: it cannot be made: the disk is full, the run's folder was removed.
        """
        if self.path is None:
            return None
        path = self.path / f"attempt_{generation}"
        with needing(path):
            private.make_folder(path)
        return path

    def keep(self) -> None:
        """Something in it is worth reading: a failure, output."""
        self._keep = True

    def close(self) -> None:
        """Remove a private folder that nobody asked for and that holds nothing of interest."""
        if not self._keep and self.path is not None:
            shutil.rmtree(self.path, ignore_errors=True)


@contextmanager
def needing(path: Path) -> Iterator[None]:
    """Around writing to a path below the folder.

    Raises:
        LaunchError: it cannot be written, for a reason that is not a limit of the system.
    """
    try:
        yield
    except OSError as error:
        if limits.explain(error) is not None:
            raise
        raise LaunchError(
            f"cannot write logs at {path}: {error.strerror}"
            " (make room there, or name another folder with --log-dir)"
        ) from None
