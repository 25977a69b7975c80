"""Mechanisms of the archive: encoding, publication, fencing and cold reads."""
