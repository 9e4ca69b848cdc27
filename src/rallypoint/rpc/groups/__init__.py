"""Membership of a group of workers, and the store through which they meet."""
