"""The broker of neve: message store, protocol and replication."""
