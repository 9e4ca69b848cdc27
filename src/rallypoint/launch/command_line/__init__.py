"""Makes a LaunchConfig from a command line."""
