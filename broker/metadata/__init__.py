"""What changes in tables goes through the log: written by a master, followed by a start and by slaves.

Read metadata_journal, metadata_log, user_changes, images, slave_synchronize. The records' format is
`broker.tables.changes`.
"""
