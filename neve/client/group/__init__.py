"""What members of a group do: share queues, fetch, keep positions, settle."""
