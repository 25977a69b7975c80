"""Pop consumption: the broker hands out single messages and keeps who has which, until when."""
