"""Where a read goes: hot, old or cold; what waits; what a subscription selects."""
