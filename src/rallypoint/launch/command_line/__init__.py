"""From a command line to a LaunchConfig."""
