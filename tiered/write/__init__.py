"""Writing of the archive, from sealed segments to objects: plan, encode, upload, commit."""
