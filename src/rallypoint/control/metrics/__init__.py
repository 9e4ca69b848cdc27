"""A job in numbers, for Prometheus and what reads its formats."""
