"""Policy by the clock: when to seal, offload, evict, expire."""
