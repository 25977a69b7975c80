"""From offsets to records out of objects: located, fetched, decoded, kept."""
