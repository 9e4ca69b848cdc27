"""What a rank copies to other nodes."""
