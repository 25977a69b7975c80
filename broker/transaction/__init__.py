"""Transactional messages: half messages, their ends and the check-backs."""
