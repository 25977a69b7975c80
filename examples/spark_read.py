"""Read an archived topic with Spark. It needs Java 17 or 21, and no broker.

neve up --data /tmp/neve --store dir:/tmp/neve-archive & python examples/producer.py
neve archive offload --roll && python examples/spark_read.py
"""

from pyspark.sql import functions as f

from neve.spark import read_topic, session

STORE = "dir:/tmp/neve-archive"

spark = session(STORE)
orders = read_topic(spark, "orders", store=STORE, decode="json", schema="id INT, amount DOUBLE")
totals = orders.groupBy("tags").agg(f.count("*").alias("orders"), f.sum("value.amount").alias("amount"))
totals.orderBy("tags").show()
spark.stop()
