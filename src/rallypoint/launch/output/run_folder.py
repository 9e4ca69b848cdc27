"""The folder of a run: ``<log-dir>/<run-id>_<random>/attempt_<generation>/<local-rank>/{stdout,stderr}.log, error.json``.

The layout is torchrun's. A folder is never used twice, and never deleted if it holds output.
"""

from __future__ import annotations

import os
import re
import secrets
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from rallypoint._core import addresses, limits, log_folder, private
from rallypoint.errors import ConfigError, LaunchError
from rallypoint.launch.config import LogConfig


class RunFolder:
    """The folder of one run, created on construction; with ``/dev/null``, none is created.

    Raises:
        ConfigError: the folder cannot be created.
    """

    def __init__(self, config: LogConfig, run_id: str) -> None:
        self._has_output = config.redirects.any() or config.tee.any()
        self._keep = config.folder is not None or self._has_output
        self.path: Path | None = None
        self._newest: Path | None = None  # the newest folder of a generation or a loss
        # The user asked for output but does not know this temporary folder: print its path.
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
                    f"cannot create a temporary folder: {error.strerror}",
                    "set it, or --log-dir, to a writable folder",
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
                f"cannot create a folder there: {error.strerror}",
                "name a writable folder",
            ) from None
        self.path = path

    def generation(self, generation: int, replaced: int = 0) -> Path | None:
        """Create the folder of one generation.

        Args:
            replaced: for a worker of a session that takes a lost one's place: the number of the loss.
        Raises:
            LaunchError: it cannot be created: the disk is full, or the run's folder was removed.
        """
        if self.path is None:
            return None
        path = self.path / (f"attempt_{generation}" + (f".{replaced}" if replaced else ""))
        if path != self._newest:  # several workers may be lost at once
            with needing(path):
                private.make_folder(path)
            self._newest = path
        return path

    def existing(self, generation: int) -> Path | None:
        """The folder of one generation; None if no worker of it was started here."""
        path = None if self.path is None else self.path / f"attempt_{generation}"
        return path if path is not None and path.is_dir() else None

    def note_ranks(self, attempt: Path | None, ranks: Mapping[int, int]) -> None:
        """Write down the rank of each local rank in a generation, if there is output.

        Args:
            attempt: as :meth:`generation` returned it.
            ranks: by local rank.
        Raises:
            LaunchError: it cannot be written.
        """
        if attempt is not None and self._has_output:
            with needing(attempt):
                log_folder.note_ranks(attempt, addresses.hostname(), ranks)

    def keep(self) -> None:
        """Do not remove the folder on close: it holds a failure or output."""
        self._keep = True

    def close(self) -> None:
        """Remove the folder, unless the user asked for it or :meth:`keep` was called."""
        if not self._keep and self.path is not None:
            shutil.rmtree(self.path, ignore_errors=True)


@contextmanager
def needing(path: Path) -> Iterator[None]:
    """Wraps code that writes to ``path``.

    Raises:
        LaunchError: it cannot be written. (An OSError for a limit of the system passes unchanged.)
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
