"""The message record: layout, codec, properties, ids, bodies. Read them in this order."""
