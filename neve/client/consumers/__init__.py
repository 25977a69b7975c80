"""The consumers that applications hold."""
