"""The relay's HTTP endpoints.

In reading order: ``relay_endpoints`` (every endpoint, with its parameters, as a table),
``relay_server`` (the worker: handlers and process), ``dump_proxy`` (dump requests passed to the
fetcher), ``relay_metrics`` (Prometheus), ``status.js`` (the status page's own part).

To add an endpoint: an entry in ``relay_endpoints``, and the method ``answer_<name>`` in
``relay_server``.  The fetcher's own endpoints, on its unix socket, are in
``processes/fetcher_api``.

Imported by ``local_relay``; the supervisor starts it by its name.
"""
