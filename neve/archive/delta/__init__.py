"""A topic's archive as a Delta table for other engines: the format of its log and its reader. Without Arrow."""
