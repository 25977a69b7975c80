"""Messages that wait for delivery: delay levels, timers, half messages and their check-back."""
