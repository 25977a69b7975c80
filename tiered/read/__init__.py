"""Cold reads, from offsets to records in objects: locate, fetch, decode, cache."""
