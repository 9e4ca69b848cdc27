"""``--avoid-hosts``: what counts against a host, and the list of hosts that jobs must not run on."""
