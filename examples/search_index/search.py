"""Print the products that match some words: python search.py WORD..."""

import sqlite3
import sys

query = " ".join(sys.argv[1:])
found = sqlite3.connect("search.db").execute(
    "SELECT rowid, name, description FROM products WHERE products MATCH ? ORDER BY rank", (query,)
)
for row in found:
    print(*row, sep=" | ")
