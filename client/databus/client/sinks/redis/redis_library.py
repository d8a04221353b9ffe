"""redis-py: imported late, with an error that names the extra, and its errors as ours."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

from databus.common.errors import ConfigError, SinkRefused, SinkUnavailable
from databus.common.extras import imports_of_extra

_REFUSED = ("WRONGTYPE", "NOPERM", "CROSSSLOT", "NOAUTH", "WRONGPASS")


def redis_library() -> Any:
    """The module ``redis``.

    Raises:
        MissingDependency: it is not installed.
    """
    with imports_of_extra("sink-redis", package="redis", needed_by="a sink to Redis"):
        import redis
    return redis


def connected(url: str, timeout_s: float) -> Any:
    """A client with one connection that never reconnects by itself.

    A reconnection in the middle of a transaction would run the rest of its commands one by one.

    Raises:
        ConfigError: the URL is not one of Redis.
    """
    redis = redis_library()
    from redis.backoff import NoBackoff
    from redis.retry import Retry

    try:
        return redis.Redis.from_url(
            url,
            single_connection_client=True,
            socket_timeout=timeout_s,
            socket_connect_timeout=timeout_s,
            retry=Retry(NoBackoff(), 0),
            retry_on_error=[],
            health_check_interval=0,
            protocol=2,
        )
    except ValueError as error:
        raise ConfigError(f"[sink.redis] url: {error}") from None


@contextlib.contextmanager
def as_ours(doing: str) -> Iterator[None]:
    """Errors of the driver as errors of a sink.

    Raises:
        SinkRefused: a retry cannot help.
        SinkUnavailable: any other error.
    """
    redis = redis_library()
    try:
        yield
    except redis.exceptions.RedisError as error:
        raise refusal(doing, error) or SinkUnavailable(f"{doing}: {error}") from error
    except OSError as error:
        raise SinkUnavailable(f"{doing}: {error!r}") from error


def refusal(doing: str, error: Exception) -> SinkRefused | None:
    """The error of a reply that a retry does not change; None for any other one."""
    redis = redis_library()
    text = str(error)
    if isinstance(error, redis.exceptions.MovedError):
        return SinkRefused(
            f"{doing}: this node of the cluster does not have the slot (MOVED {text}); "
            "set url to the node that has it"
        )
    is_refused = isinstance(
        error, redis.exceptions.AuthenticationError | redis.exceptions.AuthorizationError
    ) or any(word in text for word in _REFUSED)
    return SinkRefused(f"{doing}: {text}") if is_refused else None
