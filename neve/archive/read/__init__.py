"""Reading and verifying an archive without a broker."""
