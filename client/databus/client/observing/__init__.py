"""Shows what a client does: metrics and traces.  Nothing is imported or counted until it is used.

In reading order: ``client_metrics`` (the names and values, out of ``Status``),
``prometheus_metrics`` and ``opentelemetry_metrics`` (give them at a scrape or an export),
``traced_consumer`` (a span for each window or batch).

Applications import it.  It imports ``client`` and ``application``.
"""
