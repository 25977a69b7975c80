"""Request processors: they translate between the wire and the broker; `table` maps request codes to them."""
