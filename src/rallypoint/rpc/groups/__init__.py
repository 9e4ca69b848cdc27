"""Who is in a group of workers, and the store that they meet in."""
