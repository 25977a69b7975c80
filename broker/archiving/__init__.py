"""The broker's side of its archive: attached, restored, asked by the lifecycle's jobs."""
