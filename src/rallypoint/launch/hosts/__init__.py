"""``rally run --hosts a,b``: a supervisor on each host, started over ssh."""
