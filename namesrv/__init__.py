"""The name server: route tables, key-value settings and their requests."""
