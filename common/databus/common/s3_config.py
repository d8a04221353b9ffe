"""The configuration of a store on S3."""

from __future__ import annotations

import pydantic
from pydantic import Field

from databus.common.config_values import Seconds, Section


class S3Options(Section):
    """``[bootstrap.s3]``, ``[export.s3]`` and ``[cluster.s3]``: how an S3 store is reached.

    An empty value comes from the environment (``AWS_*``) or from the machine's role. The log
    writer and the server use those of their machine, and Spark's tasks those of theirs.
    """

    endpoint: str = ""
    """URL of the S3 service. Empty for Amazon.
    Example: endpoint = "http://127.0.0.1:9000" """

    region: str = ""
    """Region of the bucket.
    Example: region = "eu-central-1" """

    access_key: str = ""
    """Access key.
    Example: access_key = "AKIDEXAMPLE" """

    secret_key: pydantic.SecretStr = pydantic.SecretStr("")
    """Secret key.
    Example: secret_key = "secret" """

    session_token: pydantic.SecretStr = pydantic.SecretStr("")
    """Session token of temporary credentials.
    Example: session_token = "token" """

    request_timeout: Seconds = Field(default=20.0, gt=0)
    """Longest time without an answer, for each attempt.
    Example: request_timeout = "10s" """

    attempts: int = Field(default=8, ge=1, le=100)
    """Number of attempts of each request.
    Example: attempts = 3 """

    lease_ttl: Seconds = Field(default=30.0, ge=1)
    """Time after which another writer or applier takes over from one that has died.
    Example: lease_ttl = "1min" """
