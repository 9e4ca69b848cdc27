"""``--avoid-hosts``: what counts against a host, and the list of those that jobs are not to run on."""
