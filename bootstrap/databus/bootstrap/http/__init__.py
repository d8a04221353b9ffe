"""The bootstrap server's HTTP endpoints.

In reading order: ``bootstrap_endpoints`` (every endpoint as a table), ``bootstrap_requests``
(queries as values), ``bootstrap_server`` (the handlers), ``bootstrap_metrics``, ``status.html``.

To add an endpoint: a line in ``bootstrap_endpoints``, a route and a handler in
``bootstrap_server``.

Imported by ``processes``.
"""
