"""The built-in backends: ``tcpstore``, ``static``, ``etcd``, ``file``, and ``memory`` (one process; the reference)."""
