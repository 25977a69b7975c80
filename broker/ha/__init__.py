"""A broker set's log on its way from its master to its slaves.

frames, epochs, greeting          what is said, which master wrote what, who may follow whom
confirm, member                   up to where the log is safe; who has which role when
master_session, slave_session     the two ends of a connection, without I/O
plain_session, stock_master, plain_slave    the same under an Apache master without a controller
ha_service, ha_client             their sockets; epoch_file, member_file: what is on the disk
controller_calls, controllers     what controllers are asked, and their connections
replicas_manager, reign           drives the member; what it says of each append. settings: what an operator may ask for
"""
