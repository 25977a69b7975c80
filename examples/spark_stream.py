"""Append new archived messages to a table of Parquet files, each once. Run it again after new messages are archived.

neve archive offload --roll && python examples/spark_stream.py
"""

from neve.spark import decode_bodies, session

STORE = "dir:/tmp/neve-archive"
TABLE = "/tmp/neve-orders"

spark = session(STORE)
messages = spark.readStream.format("neve").options(store=STORE, topic="orders", startingOffsets="earliest").load()
orders = decode_bodies(messages, "json", schema="id INT, amount DOUBLE").select("store_timestamp", "tags", "value.*")
query = orders.writeStream.format("parquet").option("checkpointLocation", f"{TABLE}.checkpoint")
query.trigger(availableNow=True).start(TABLE).awaitTermination()
print(f"{spark.read.parquet(TABLE).count()} orders in {TABLE}")
spark.stop()
