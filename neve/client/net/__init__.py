"""Connections, sessions and routes."""
