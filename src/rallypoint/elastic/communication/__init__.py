"""Communication between ranks across losses: process groups that outlive their members, and notes."""
