"""What a request means on the wire: each processor translates, `table` says which code is whose."""
