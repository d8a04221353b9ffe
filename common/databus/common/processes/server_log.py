"""The log of our processes, on stderr: lines of text, or a JSON object a line."""

from __future__ import annotations

import datetime as dt
import json
import logging
import os

from databus.common.errors import ConfigError

LOG_FORMAT = "DATABUS_LOG_FORMAT"
"""The environment variable with the format; children inherit it."""


class JsonLines(logging.Formatter):
    """A record as one line: time (ISO 8601, UTC), level, logger, process, message, exception."""

    def format(self, record: logging.LogRecord) -> str:
        """The line, without its end."""
        document = {
            "time": dt.datetime.fromtimestamp(record.created, dt.UTC).isoformat(),
            "level": record.levelname,
            "logger": record.name,
            "process": record.process,
            "message": record.getMessage(),
        }
        if record.exc_info:
            document["exception"] = self.formatException(record.exc_info)
        return json.dumps(document, ensure_ascii=False)


_FORMATTERS: dict[str, logging.Formatter] = {
    "text": logging.Formatter("%(asctime)s %(levelname)s %(message)s"),
    "json": JsonLines(),
}


def log_to_stderr(*, level: int = logging.INFO) -> None:
    """Log to stderr from ``level`` on; of libraries only warnings and errors.

    Raises:
        ConfigError: DATABUS_LOG_FORMAT is neither text nor json.
    """
    name = os.environ.get(LOG_FORMAT) or "text"
    if name not in _FORMATTERS:
        raise ConfigError(f"the log format {name!r} is neither text nor json")
    handler = logging.StreamHandler()
    handler.setFormatter(_FORMATTERS[name])
    logging.basicConfig(level=logging.WARNING, handlers=[handler])
    logging.getLogger("databus").setLevel(level)
    logging.captureWarnings(True)
