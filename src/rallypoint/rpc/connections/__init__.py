"""The lines between workers: how they are made, what goes over them, who reads."""
