"""Which messages of a queue a consumer wants, beyond the hash of a tag."""
