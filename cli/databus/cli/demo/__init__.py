"""`databus demo`: the whole system at work on a small shop, with a verdict at the end."""
