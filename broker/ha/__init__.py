"""A broker set's log on its way from its master to its slaves.

frames, epochs, greeting          what is said, which master wrote what, who may follow whom
confirm, member                   up to where the log is safe; who has which role when
master_session, slave_session     the two ends of a connection, without I/O
ha_service, ha_client             their sockets; epoch_file: the epochs on the disk
"""
