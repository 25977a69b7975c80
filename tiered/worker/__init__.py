"""The worker processes of the archive: their program, the messages to them, and the client that starts them."""
