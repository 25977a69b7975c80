"""Promotion of a copy of an Apache master's log: messages that wait in RocketMQ's form are converted to neve's."""
