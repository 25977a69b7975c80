"""Declared pipelines: Spark's own (`pyspark.pipelines`), with what they need to run beside an archive.

`project` writes one to begin with, `run` carries it out, `record` keeps what its runs did, `status` tells it.
"""
