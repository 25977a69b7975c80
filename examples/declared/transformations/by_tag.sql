-- Each run computes this view again, over all rows of `clean`.
CREATE MATERIALIZED VIEW by_tag USING parquet AS
SELECT tags, count(*) AS messages, max(store_timestamp) AS newest FROM clean GROUP BY tags
