"""A package, so that its session-wide servers stop with its last test."""
