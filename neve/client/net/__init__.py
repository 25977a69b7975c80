"""Connections, name servers, routes, requests and membership."""
