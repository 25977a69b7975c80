"""Long polling: pull, pop and notification requests that found no message wait here until one arrives."""
