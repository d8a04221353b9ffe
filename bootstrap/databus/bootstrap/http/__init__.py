"""The bootstrap server's HTTP endpoints.

In reading order: ``bootstrap_endpoints`` (every endpoint as a table), ``bootstrap_requests``
(queries as values), ``bootstrap_server`` (the handlers), ``bootstrap_metrics``,
``status.js`` (the status page's own part).

To add an endpoint: an entry in ``bootstrap_endpoints``, and the method ``answer_<name>`` in
``bootstrap_server``.

Imported by ``processes``.
"""
