"""Decisions over a catalog: expiry, reversal of expiry, erasure, TTL and cost. Pure."""
