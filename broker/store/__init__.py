"""The hot store, synchronous. Start reading at message_store."""
