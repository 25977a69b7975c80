"""`neve demo`: real flights through a broker, its archive and Spark, compared with their source."""
