"""How the supervisors of a job act together."""
