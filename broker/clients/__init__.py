"""Who is connected: members of groups, queue locks, the name servers."""
