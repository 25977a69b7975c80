"""Who may: users, policies and the guard before a server's requests. Read model, permissions, store, guard, admin."""
