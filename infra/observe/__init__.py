"""Logs, metrics, lasting conditions and event loop lag of a server."""
