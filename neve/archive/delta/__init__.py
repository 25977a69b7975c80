"""A topic's archive as a Delta table for other engines: what stands in its log, and how that is read. No pyarrow."""
