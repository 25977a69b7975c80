"""Where a read goes: hot, old or cold; what a subscription selects."""
