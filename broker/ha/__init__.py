"""Replication of a broker set's log from its master to its slaves.

frames, epochs, greeting          wire format; which master wrote which bytes; which members may pair up
confirm, member                   the confirm offset of a master; the role of a member, with its durable record
                                  (member_record) and its requests to controllers (member_requests)
master_session, slave_session     the two ends of a replication connection, without I/O
plain_session, stock_master, plain_slave    the slave's end under an Apache master without a controller
ha_service, ha_client             the sockets of both ends; epoch_file, member_file: files on the disk
controller_calls, controllers     requests to controllers, and the connections to them
replicas_manager                  drives the member: controller_requests, master_term, archive_settling,
                                  master_follower and diverged_tail do its actions
member_life, member_role, member_status     start and end of a life; the broker's role; faults for operators
role_state, admission, settings   what depends on the role; admission of each append; configuration of the set
"""
