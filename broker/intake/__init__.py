"""What a put means: checks, the express lane, receipts, group commit."""
