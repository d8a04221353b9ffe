"""What the HTTP servers of relay and bootstrap share, and the HTTP client.

In reading order: ``http_application`` (the application: errors, guards, shutdown),
``http_connections`` and ``request_guard`` (limits, and which requests may change something),
``listening_socket``, ``tcp_options``; ``request_parameters`` (query parameters as values),
``openapi_document`` (the document made of a table of endpoints), ``endpoint_routes`` (the routes
made of it), ``admission`` (who may send which request), ``status_page`` (what all servers' pages
for browsers share); ``stream_formats`` and ``json_rendering`` (frames, NDJSON and server-sent
events as an answer's body); ``peer_client`` (the HTTP client of all rooms), ``peer_calls`` (the
same without an event loop), ``peer_answers`` (what the two share: bounds, errors).

Imported by every room; ``http_application``, ``admission`` and ``endpoint_routes`` only by the
servers, because they import aiohttp's server.
"""
