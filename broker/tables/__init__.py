"""Tables of topics, groups and committed offsets, and the files in which they are stored."""
