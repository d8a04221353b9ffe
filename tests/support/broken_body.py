"""A server whose error answers break off in the middle."""

from __future__ import annotations

import contextlib
import http.server
import threading
from collections.abc import Iterator


@contextlib.contextmanager
def breaking_off(status: int) -> Iterator[str]:
    """The URL of one that answers everything with ``status`` and a part of a body."""
    with http.server.HTTPServer(("127.0.0.1", 0), handler(status)) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}"
        finally:
            server.shutdown()
            thread.join()


def handler(status: int) -> type[http.server.BaseHTTPRequestHandler]:
    class Breaking(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(status)
            self.send_header("Content-Length", "1000")
            self.end_headers()
            self.wfile.write(b'{"code": "bad_')

        def log_message(self, format: str, *args: object) -> None:
            """Nothing."""

    return Breaking
