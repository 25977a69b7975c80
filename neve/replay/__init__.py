"""Sending again what a topic had: a named task that goes on where it was, whatever ended it.

run       reads, sends, notes how far it is, in that order
archive_source | source    where messages come from: an archive, brokers
again     which messages are meant, and what is sent for each (pure)
book      the tasks' files in a directory
task      what a task is (values)
"""
