"""Import of an Apache broker's data directory: its log, its tables, its committed offsets."""
