"""nats-py: imported late, with an error that names the extra, and its errors as ours."""

from __future__ import annotations

import contextlib
from collections.abc import Awaitable, Callable, Iterator, Sequence
from typing import Any

from databus.common.errors import RowRefused, SinkRefused, SinkUnavailable
from databus.common.extras import imports_of_extra

_TOO_LARGE = 10054
_BAD_SETTINGS = frozenset({10052, 10058, 10065, 10074})
"""Settings that are invalid, a name in use, overlapping subjects, too many replicas."""
WRONG_SEQUENCE = frozenset({10071, 10164})


def nats_library() -> Any:
    """The module ``nats``.

    Raises:
        MissingDependency: it is not installed.
    """
    with imports_of_extra("sink-nats", package="nats-py", needed_by="a sink to NATS"):
        import nats
        import nats.errors
        import nats.js.errors
    return nats


@contextlib.contextmanager
def as_ours(doing: str) -> Iterator[None]:
    """Errors of the driver as errors of a sink.

    Raises:
        RowRefused: the message is larger than the server takes.
        SinkRefused: a retry cannot help.
        SinkUnavailable: any other error.
    """
    nats = nats_library()
    try:
        yield
    except nats.errors.MaxPayloadError as error:
        raise RowRefused(f"{doing}: {_TOO_LARGE_TEXT}") from error
    except nats.js.errors.APIError as error:
        text = str(error.description or error)
        raise refusal_or_failure(doing, error.err_code or 0, text) from error
    except nats.js.errors.NoStreamResponseError as error:
        raise SinkUnavailable(f"{doing}: JetStream does not answer") from error
    except nats.errors.AuthorizationError as error:
        raise SinkRefused(f"{doing}: {error}") from error
    except (nats.errors.Error, OSError, TimeoutError) as error:
        if "uthorization" in str(error) or "uthentication" in str(error):
            raise SinkRefused(f"{doing}: {error}") from error
        raise SinkUnavailable(f"{doing}: {error or type(error).__name__}") from error


def refusal_or_failure(doing: str, code: int, text: str) -> SinkRefused | SinkUnavailable:
    """The error of JetStream with this code."""
    if code == _TOO_LARGE:
        return SinkRefused(f"{doing}: {_TOO_LARGE_TEXT}")
    if code in _BAD_SETTINGS:
        return SinkRefused(f"{doing}: {text}")
    return SinkUnavailable(f"{doing}: {text}")


_TOO_LARGE_TEXT = (
    "a message is larger than the server takes; raise max_payload, or leave large columns out with "
    "`columns`"
)


async def connected(
    urls: Sequence[str],
    *,
    name: str,
    credentials: str,
    timeout_s: float,
    on_close: Callable[[], Awaitable[None]],
) -> Any:
    """A connection to the first server that answers.  It never reconnects by itself: what a lost
    connection did is decided by a look at the stream.

    Raises:
        SinkRefused: a server refused the user.
        SinkUnavailable: no server answers.
    """
    nats = nats_library()

    async def on_error(_: Exception) -> None:
        """It is raised as well."""

    settings: dict[str, Any] = {"user_credentials": credentials} if credentials else {}
    with as_ours("connecting"):
        return await nats.connect(
            list(urls),
            name=f"databus sink {name}",
            allow_reconnect=False,
            max_reconnect_attempts=1,
            reconnect_time_wait=0,
            connect_timeout=timeout_s,
            error_cb=on_error,
            closed_cb=on_close,
            skip_subject_validation=True,
            **settings,
        )
