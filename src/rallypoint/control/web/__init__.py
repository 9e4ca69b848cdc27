"""``rally web``: a page about the jobs on this host."""
