"""RocketMQ's Remoting protocol without I/O: bytes in, commands out, and back."""
