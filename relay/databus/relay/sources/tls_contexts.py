"""The TLS contexts of connections to databases."""

from __future__ import annotations

import ssl


def client_context(ca: str | None, *, verifies: bool, checks_name: bool) -> ssl.SSLContext:
    """A context that trusts the file ``ca``, else the machine's certificates.

    Where nothing is verified, the machine's certificates are not read: that takes about 20 ms.

    Raises:
        OSError: the file cannot be read, or has no certificate.
    """
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = checks_name
    context.verify_mode = ssl.CERT_REQUIRED if verifies else ssl.CERT_NONE
    if ca:
        context.load_verify_locations(ca)
    elif verifies:
        context.load_default_certs()
    return context
