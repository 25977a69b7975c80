"""Archive stores opened by URL: a directory, or S3 through boto3."""
