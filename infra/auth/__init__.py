"""Who may do what: users, policies, and the check in front of a server's handlers (after RocketMQ's ACL 2.0)."""
