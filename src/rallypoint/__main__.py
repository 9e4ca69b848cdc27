"""The command ``rally``, also as ``python -m rallypoint``."""


def main() -> int:
    """Run the command line of this process. Returns the exit code."""
    try:
        # Takes 0.1 s, in which somebody who has mistyped presses Ctrl-C.
        from rallypoint.launch.cli import main as command
    except KeyboardInterrupt:
        return 130
    return command()


if __name__ == "__main__":
    raise SystemExit(main())
