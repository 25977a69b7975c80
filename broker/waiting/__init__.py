"""Messages that wait: delay levels, timers, half messages and their check-back."""
