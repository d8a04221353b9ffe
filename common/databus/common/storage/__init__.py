"""Stores that two rooms use.

``durable_files`` replaces and syncs files.  ``bucket`` is a bucket of S3 or of a compatible store;
it needs the extra ``s3``.  ``lmdb_file`` checks an LMDB file before LMDB maps it.

Imported by relay, client and bootstrap.
"""
