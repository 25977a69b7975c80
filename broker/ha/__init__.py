"""A broker set's log, from its master to its slaves: frames, epochs, confirm, then the two ends. Read in this order."""
