"""Connected clients: members of groups, queue locks, and the registration with name servers."""
