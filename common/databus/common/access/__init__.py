"""Protects connections between Databus processes, and decides what a caller may do.

In reading order: ``listener_tls`` (certificates of listeners, read again when their files change),
``listener_rules`` (which listeners a network may reach), ``credentials`` (what a client of ours
presents: CA, token, certificate); ``grants`` (pure: what an endpoint needs and what a caller may
get), ``authority`` (tokens and certificates as callers), ``identity_tokens`` (an identity
provider's) and ``identity_keys`` (its keys), ``request_limits`` (of each caller).

Imported by ``http`` and by every room.  It imports nothing of ``http``.
"""
