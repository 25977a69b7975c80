"""What is counted and shown: rates, metrics, conditions, the pages of the admin port."""
