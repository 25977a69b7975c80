"""Rows to topics: `df.write.format("neve")`, `df.writeStream.format("neve")`.

writer    what Spark calls, on the driver and in tasks
rows      rows of Arrow batches as messages: which columns there may be, and who a row is
options   what a query asks for
"""
