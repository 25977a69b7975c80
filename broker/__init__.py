"""The broker: what a request means."""
