"""Rows to topics: `df.write.format("neve")`, `df.writeStream.format("neve")`.

writer    Spark's interface, on the driver and in tasks
rows      rows of Arrow batches as messages: columns, and the identity of a row
options   the options of a write
"""
