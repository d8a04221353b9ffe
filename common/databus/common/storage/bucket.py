"""One bucket of S3 or of a compatible store: for the client's exports and the bootstrap's runs.

Data goes through ``pyarrow.fs``; what needs a condition and what is a list goes through boto3,
because Arrow's file system has no conditional write.  Both come with the extra ``s3`` and with
that of the room, and are imported where a bucket is opened.

Both get the same endpoint, region and credentials: those of the options, else what the
environment or the machine's role gives.
"""

from __future__ import annotations

import contextlib
import datetime as dt
import email.utils
import functools
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from databus.common.errors import BucketError, ConfigError, ServerUnavailable
from databus.common.extras import imports_of_extra

if TYPE_CHECKING:
    from databus.common.config import S3Options

ENDPOINT_VARIABLES = ("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL")
REGION_VARIABLES = ("AWS_REGION", "AWS_DEFAULT_REGION")
_PAGE = 1000
_CONFLICTS = (409, 412)
_REFUSED = (
    "AccessDenied",
    "ExpiredToken",
    "InvalidAccessKeyId",
    "InvalidToken",
    "SignatureDoesNotMatch",
    "403",
)


def arrow_settings(options: S3Options) -> dict[str, Any]:
    """The arguments for ``pyarrow.fs.S3FileSystem``, here and in Spark's tasks.

    They hold only what the options give: tasks take the rest from the machine that runs them.
    """
    endpoint = options.endpoint or _first_variable(ENDPOINT_VARIABLES)
    settings: dict[str, Any] = {
        "request_timeout": options.request_timeout,
        "connect_timeout": min(options.request_timeout, 10.0),
        "attempts": options.attempts,
    }
    if endpoint:
        parts = urlsplit(endpoint)
        if parts.scheme not in ("http", "https") or not parts.netloc:
            raise ConfigError(f"endpoint {endpoint!r} is not of the form https://host:port")
        settings |= {"endpoint_override": parts.netloc, "scheme": parts.scheme}
    if options.region:
        settings["region"] = options.region
    if options.access_key:
        settings |= {
            "access_key": options.access_key,
            "secret_key": options.secret_key.get_secret_value(),
        }
        if options.session_token.get_secret_value():
            settings["session_token"] = options.session_token.get_secret_value()
    return settings


def _first_variable(names: tuple[str, ...]) -> str:
    return next((os.environ[name] for name in names if os.environ.get(name)), "")


def _endpoint(settings: Mapping[str, Any]) -> str | None:
    if "endpoint_override" not in settings:
        return None
    return f"{settings['scheme']}://{settings['endpoint_override']}"


def filesystem(settings: Mapping[str, Any]) -> Any:
    """Arrow's file system of S3 with the settings that ``arrow_settings`` gives."""
    from pyarrow import fs

    given = dict(settings)
    retry = fs.AwsStandardS3RetryStrategy(max_attempts=given.pop("attempts"))
    # What fits into one part is written by one request instead of three.
    return fs.S3FileSystem(retry_strategy=retry, allow_delayed_open=True, **given)


def _client(options: S3Options) -> Any:
    with imports_of_extra("s3", package="boto3", needed_by="a store on S3"):
        import boto3
        from botocore.config import Config
    settings = arrow_settings(options)
    endpoint = _endpoint(settings)
    # Endpoints that are not Amazon's are addressed by path: their names have no wildcards.
    addressing = {"addressing_style": "path"} if endpoint else {}
    return boto3.client(
        "s3",
        endpoint_url=endpoint,
        region_name=options.region or None,
        aws_access_key_id=settings.get("access_key"),
        aws_secret_access_key=settings.get("secret_key"),
        aws_session_token=settings.get("session_token"),
        config=Config(
            connect_timeout=settings["connect_timeout"],
            read_timeout=options.request_timeout,
            retries={"mode": "standard", "total_max_attempts": options.attempts},
            s3=addressing,
        ),
    )


@dataclass(frozen=True, slots=True)
class Object:
    """A small object: its content, its entity tag for a conditional write, and its note.

    ``age_s`` is by the server's clock.
    """

    content: bytes
    tag: str
    age_s: float
    note: str


class Bucket:
    """One bucket's two connections: boto3's and Arrow's.

    Owner: the process; any thread.
    Raises: BucketError with what S3 answered.
    """

    def __init__(self, name: str, options: S3Options) -> None:
        self.name = name
        self.options = options
        self.settings = arrow_settings(options)
        self._client = _client(options)

    @functools.cached_property
    def filesystem(self) -> Any:
        """Arrow's file system; what has only small objects does without Arrow."""
        return filesystem(self.settings)

    @contextlib.contextmanager
    def _request(self, what: str) -> Iterator[None]:
        from botocore.exceptions import BotoCoreError, ClientError

        try:
            yield
        except (BotoCoreError, ClientError) as error:
            raise BucketError(f"s3://{self.name}/{what}: {error}") from error

    def check(self, prefix: str) -> None:
        """Check that the bucket exists and that the credentials can list it.

        Raises:
            ConfigError: it does not exist, or they cannot.
            ServerUnavailable: the endpoint does not answer.
        """
        from botocore import exceptions as aws

        url = f"s3://{self.name}/{prefix}".rstrip("/")
        where = f" at {self.endpoint}" if self.endpoint else ""
        try:
            with self._request(prefix):
                self._client.list_objects_v2(Bucket=self.name, Prefix=prefix, MaxKeys=1)
        except BucketError as error:
            cause = error.__cause__
            if isinstance(cause, (aws.NoCredentialsError, aws.PartialCredentialsError)):
                raise ConfigError(
                    f"{url}: there are no credentials for S3: give access_key and secret_key, "
                    "or AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY in the environment, or a role"
                ) from error
            if isinstance(cause, (aws.ConnectionError, aws.HTTPClientError)):
                raise ServerUnavailable(f"{url}: {cause}") from error
            found = cause.response.get("Error", {}) if isinstance(cause, aws.ClientError) else {}
            if found.get("Code") == "NoSuchBucket":
                raise ConfigError(f"{url}: there is no bucket {self.name!r}{where}") from error
            if found.get("Code") in _REFUSED:
                raise ConfigError(
                    f"{url}: S3{where} refuses the credentials: {found['Code']}, "
                    f"{found.get('Message')}"
                ) from error
            raise

    def get(self, key: str) -> Object | None:
        """A small object; None if it is not there."""
        from botocore.exceptions import ClientError

        with self._request(key):
            try:
                answer = self._client.get_object(Bucket=self.name, Key=key)
            except ClientError as error:
                if error.response.get("Error", {}).get("Code") in ("NoSuchKey", "404"):
                    return None
                raise
            content = answer["Body"].read()
        date = answer["ResponseMetadata"]["HTTPHeaders"].get("date")
        now = email.utils.parsedate_to_datetime(date) if date else dt.datetime.now(dt.UTC)
        return Object(
            content,
            answer["ETag"],
            (now - answer["LastModified"]).total_seconds(),
            answer["Metadata"].get("databus", ""),
        )

    def put(self, key: str, content: bytes, tag: str | None, note: str = "") -> str | None:
        """Write an object if the present one has ``tag`` (None: if there is none); its new tag.

        ``note`` is ASCII of at most 2,000 letters that changes with the content.
        None if something else is there: then nothing was written, or it was written by an
        attempt of this call whose answer was lost.
        """
        from botocore.exceptions import ClientError

        condition = {"IfNoneMatch": "*"} if tag is None else {"IfMatch": tag}
        metadata = {"Metadata": {"databus": note}} if note else {}
        with self._request(key):
            try:
                answer = self._client.put_object(
                    Bucket=self.name, Key=key, Body=content, **condition, **metadata
                )
            except ClientError as error:
                status = error.response["ResponseMetadata"]["HTTPStatusCode"]
                missing = error.response.get("Error", {}).get("Code") == "NoSuchKey"
                if status in _CONFLICTS or missing:
                    return None
                raise
        return str(answer["ETag"])

    def commit(self, key: str, content: bytes, tag: str | None, note: str = "") -> str | None:
        """As ``put``, for content or a note unique to this call: a lost answer is no loss."""
        written = self.put(key, content, tag, note)
        if written is not None:
            return written
        found = self.get(key)
        is_ours = found is not None and (found.content, found.note) == (content, note)
        return found.tag if found is not None and is_ours else None

    def replace(self, key: str, content: bytes) -> None:
        """Write an object, whatever is there."""
        with self._request(key):
            self._client.put_object(Bucket=self.name, Key=key, Body=content)

    def keys(self, prefix: str, *, folders: bool = False) -> list[str]:
        """What follows ``prefix`` in the keys, in order; with ``folders`` the next part alone."""
        found: list[str] = []
        extra = {"Delimiter": "/"} if folders else {}
        with self._request(prefix):
            pages = self._client.get_paginator("list_objects_v2").paginate(
                Bucket=self.name, Prefix=prefix, **extra
            )
            for page in pages:
                if folders:
                    found += [
                        one["Prefix"][len(prefix) : -1] for one in page.get("CommonPrefixes", ())
                    ]
                else:
                    found += [one["Key"][len(prefix) :] for one in page.get("Contents", ())]
        return found

    def delete(self, keys: list[str]) -> None:
        """Delete objects; those that are not there already count as deleted."""
        for at in range(0, len(keys), _PAGE):
            page = [{"Key": key} for key in keys[at : at + _PAGE]]
            with self._request(keys[at]):
                answer = self._client.delete_objects(
                    Bucket=self.name, Delete={"Objects": page, "Quiet": True}
                )
            if errors := answer.get("Errors"):
                raise BucketError(f"s3://{self.name}: {len(errors)} not deleted: {errors[0]}")

    @property
    def endpoint(self) -> str | None:
        """The endpoint of S3, ``https://host:port``; None for Amazon's."""
        return _endpoint(self.settings)

    @property
    def region(self) -> str:
        """The region of the options, or the environment's; empty if neither is set."""
        return self.settings.get("region") or _first_variable(REGION_VARIABLES)


def split_url(url: str) -> tuple[str, str]:
    """Bucket and prefix of ``s3://bucket/prefix``; the prefix is empty or ends with a slash.

    Raises:
        ConfigError: it is another kind of URL.
    """
    parts = urlsplit(url)
    if parts.scheme != "s3" or not parts.netloc or parts.query or parts.fragment:
        raise ConfigError(f"{url!r} is not of the form s3://bucket/prefix")
    prefix = parts.path.strip("/")
    return parts.netloc, f"{prefix}/" if prefix else ""


def open_bucket(url: str, options: S3Options) -> tuple[Bucket, str]:
    """The bucket of ``s3://bucket/prefix``, and the prefix.

    Raises:
        ConfigError: the URL or the endpoint is of another form.
        MissingDependency: boto3 is not installed.
    """
    name, prefix = split_url(url)
    return Bucket(name, options), prefix
