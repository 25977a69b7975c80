"""The broker's side of its archive: attachment, restore, and the interface of the lifecycle's jobs."""
