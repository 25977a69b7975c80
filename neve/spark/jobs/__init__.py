"""Jobs over an archive, on Spark: each a function, a verb of `neve spark`, and what `spark-submit` can start.

    verify        every object read, decoded and compared with the journal, on all cores
    materialize   a topic, decoded and typed, as a table of its own that grows with the archive
    report        traffic, sizes, tags, producers, retries and dead letters as tables and a page

Rooms that begin with `table_` are materialize's: where a table lies, what it holds, which rows it gets, and one run.
"""
