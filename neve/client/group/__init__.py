"""Members of consumer groups: they share queues, fetch messages, keep offsets and settle messages."""
