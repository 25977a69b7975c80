"""The process and its machine: start-up checks, signals, descriptors, priority, garbage collection."""
