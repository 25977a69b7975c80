"""Statistics: rates, metrics, conditions, and the pages of the admin port."""
