-- Messages by minute and tag. A window is emitted once, when a message arrives that is newer than its end by 10 seconds;
-- messages that arrive for it later are dropped.
CREATE STREAMING TABLE windows USING parquet AS
SELECT window.start AS start, window.end AS end, tags, count(*) AS messages
FROM STREAM clean WATERMARK store_timestamp DELAY OF INTERVAL 10 SECONDS
GROUP BY window(store_timestamp, '1 minute'), tags
