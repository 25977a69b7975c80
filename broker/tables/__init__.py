"""What is kept of topics, groups and positions, and how it is saved."""
