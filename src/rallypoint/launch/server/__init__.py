"""The fork server, how its supervisor holds it, and what both ask of Linux."""
