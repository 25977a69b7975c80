"""Intake of messages: checks, the express lane, send receipts, group commit and replication waits."""
