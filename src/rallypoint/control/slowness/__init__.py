"""Ranks that make the others wait, and what differs about them."""
