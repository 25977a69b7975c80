"""Local store, synchronous. Start with `message_store`."""
