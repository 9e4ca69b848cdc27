"""The lines between workers: how they are made, what goes over them, and which thread reads them."""
