"""`spark.read.format("neve")`: PySpark looks for data sources in modules that are named like this one."""

from neve.spark.data_source import NeveDataSource as DefaultSource

__all__ = ["DefaultSource"]
