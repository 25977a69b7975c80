"""Replication of tables: a master writes each change to the metadata log, which starts and slaves follow.

Read metadata_journal, metadata_log, user_changes, images, slave_synchronize. The records' format is
`broker.tables.changes`.
"""
