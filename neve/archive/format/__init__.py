"""Formats at rest: object keys, journal entries, checkpoints and broker state. Pure, without Arrow."""
