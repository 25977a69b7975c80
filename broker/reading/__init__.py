"""Reads over both tiers, local and archived, and the filters of subscriptions."""
