"""The consumers of applications."""
