"""Sockets and protocols: Remoting server, TLS, etcd, the admin port. Start with `remoting_server`."""
