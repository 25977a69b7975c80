"""The archive as mechanism: encode, publish, fence, cold read."""
