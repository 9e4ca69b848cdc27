"""What of a rank is copied to other nodes."""
