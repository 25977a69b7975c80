"""Send the windows to a topic as JSON. Each is sent at least once; those of one tag keep their order.

Windows that a killed run has already sent have the same property NEVE_SINK when the next run sends them again.
"""

from pyspark import pipelines as dp
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as f

spark = SparkSession.active()

dp.create_sink(
    "topic", "neve", {"namesrv": spark.conf.get("spark.neve.namesrv"), "topic": spark.conf.get("spark.neve.into")}
)


@dp.append_flow(target="topic")
def windows_into_topic() -> DataFrame:
    return spark.readStream.table("windows").select(
        f.to_json(f.struct("start", "end", "tags", "messages")).alias("body"),
        f.coalesce("tags", f.lit("none")).alias("order_key"),
        "tags",
    )
