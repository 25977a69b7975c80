"""Authentication and authorization of a server's requests. Read model, permissions, store, guard, admin."""
