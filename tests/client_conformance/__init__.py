"""A package so that its servers stop with its last test."""
