"""The journal of one archive: written, followed from a local copy, planned from, checked."""
