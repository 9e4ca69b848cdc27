"""``python -m rallypoint run …`` is ``rally run …``."""

from rallypoint.launch.cli import main


raise SystemExit(main())
