"""neve: formats and what users import."""
