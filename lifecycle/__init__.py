"""Jobs that act on age and disk space: seal, offload, evict, expire, erase and compact."""
