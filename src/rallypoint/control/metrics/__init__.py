"""A job's metrics, for Prometheus and compatible readers."""
