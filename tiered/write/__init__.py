"""From sealed segments to objects: plan, encode, upload, commit."""
