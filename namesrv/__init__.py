"""The name server: route tables and who answers for them."""
