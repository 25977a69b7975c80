"""The catalog of an archive: built from journal entries and checkpoints, queried by topic and queue. Without Arrow."""
