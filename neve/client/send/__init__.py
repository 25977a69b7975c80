"""Producers: what is sent, where to, and what comes back."""
