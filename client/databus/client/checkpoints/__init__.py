"""Where checkpoints are stored.

``checkpoint_stores`` has the stores: a file, LMDB, the application's own transaction, none.

Imported by ``delivery`` and ``client``.
"""
