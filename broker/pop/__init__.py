"""Pop consumption: the broker hands out single messages and records which ones are in flight, and until when."""
