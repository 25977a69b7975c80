"""The tier's worker processes: what they do, what is said to them, and who starts them."""
