"""One file for each family of requests."""
