"""Tables `clean` and `dead`: each message of the topic once, in `clean` if its body can be decoded, else in `dead`."""

from pyspark import pipelines as dp
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.types import StructType

from neve.spark import decode_bodies

spark = SparkSession.active()
# Spark's runner refuses queries inside of a definition, so the type is parsed here.
# `neve spark schema TOPIC` lists the fields that the bodies have.
BODIES = StructType.fromDDL("carrier STRING, dep_delay DOUBLE")
SOURCE = {
    "store": spark.conf.get("spark.neve.store"),
    "topic": spark.conf.get("spark.neve.topic"),
    "startingOffsets": "earliest",
    "maxOffsetsPerTrigger": "1000000",
}


def decoded() -> DataFrame:
    return decode_bodies(spark.readStream.format("neve").options(**SOURCE).load(), "json", schema=BODIES)


@dp.table(format="parquet")
def clean() -> DataFrame:
    columns = ("store_timestamp", "broker", "queue_id", "queue_offset", "tags", "value.*")
    return decoded().where("body_error IS NULL").select(*columns)


@dp.table(format="parquet")
def dead() -> DataFrame:
    columns = ("store_timestamp", "broker", "queue_id", "queue_offset", "msg_id", "body_error", "body", "body_codec")
    return decoded().where("body_error IS NOT NULL").select(*columns)
