"""The local disk and the files that a server keeps on it."""
