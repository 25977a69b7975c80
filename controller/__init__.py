"""The controller elects the masters of broker sets. Start reading at `decision`."""
