"""Copies of messages: from brokers or an archive into topics or files, resumable after a kill.

engine          reads a range of a queue in chunks and writes each
source          a topic at brokers; archive_source: a topic in an archive
messages        which messages are selected, and what is sent for each (pure)
replay          a task that sends messages to a topic: `neve replay`, `neve dlq redrive`
task            the values of a task; task_files: its cursor file, lock and mark of cancellation

`neve export` writes files by the same engine; its cursor is the last line of each file.
"""
