"""RocketMQ property files, and every key that RocketMQ knows."""
