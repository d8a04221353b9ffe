"""Rows as documents of OpenSearch or Elasticsearch.

In reading order: ``bulk_requests`` (the bodies of ``_bulk`` and what its answers mean; pure),
``search_client`` (the requests), ``search_sink`` (the sink).
"""
