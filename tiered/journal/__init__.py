"""The journal of one archive: its writer, its local copy, its plans and its checks."""
