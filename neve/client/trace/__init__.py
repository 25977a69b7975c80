"""Message traces."""
