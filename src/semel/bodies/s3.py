"""Bodies in S3, or in what speaks its protocol."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import datetime
from email.utils import parsedate_to_datetime
from typing import Any, Final, Self
from urllib.parse import parse_qsl, unquote, urlsplit

from semel.bodies.store import BodyMissing, Stored
from semel.errors import ConfigurationError, StoreUnavailable

__all__ = ["S3Bodies"]

_ABSENT: Final = frozenset({"NoSuchKey", "NotFound", "404"})
_OPTIONS: Final = frozenset({"endpoint", "region"})


class S3Bodies:
    """Objects `prefix/home/sha256` of a bucket. `client` is boto3's, or has its put_object, get_object, delete_object and
    list_objects_v2. The bucket must be there, and must not expire objects sooner than their owner does.
    """

    def __init__(self, client: Any, bucket: str, *, prefix: str = "") -> None:
        missing = [
            verb
            for verb in ("put_object", "get_object", "delete_object", "list_objects_v2")
            if not callable(getattr(client, verb, None))
        ]
        if missing or not bucket:
            raise ConfigurationError(
                f"bodies in S3 need a bucket and a client with {', '.join(missing) or 'a bucket name'}"
            )
        self.bucket = bucket
        self._client = client
        self._prefix = f"{prefix.strip('/')}/" if prefix.strip("/") else ""

    @classmethod
    def from_url(cls, url: str) -> Self:
        """From `s3://bucket/prefix?endpoint=https://…&region=…`. Credentials are found as boto3 finds them, never in the URL."""
        parts = urlsplit(url)
        options = dict(parse_qsl(parts.query))
        if not parts.hostname or parts.username or options.keys() - _OPTIONS:
            raise ConfigurationError(
                "bodies in S3 are s3://bucket/prefix, with ?endpoint= and ?region= if needed; credentials come from the "
                "environment or the profile, as boto3 has it"
            )
        try:
            import boto3
        except ModuleNotFoundError as error:  # pragma: no cover - needs an environment without it
            raise ConfigurationError(
                's3:// needs boto3: pip install "semel[s3]" brings it; or hand in a client of yours, S3Bodies(client, bucket)'
            ) from error
        client = boto3.client("s3", endpoint_url=options.get("endpoint"), region_name=options.get("region"))
        return cls(client, parts.netloc, prefix=unquote(parts.path))

    def put(self, name: str, data: bytes) -> None:
        """Keep it: S3 answers when it is durable, and shows an object whole or not at all."""
        self._call("put_object", Key=self._prefix + name, Body=data)

    def get(self, name: str) -> bytes:
        """The body."""
        answer = self._call("get_object", Key=self._prefix + name)
        try:
            data: bytes = answer["Body"].read()
        except Exception as error:
            raise StoreUnavailable(
                f"bucket {self.bucket} broke off in the middle of {name}: {error}"
            ) from error
        return data

    def delete(self, name: str) -> None:
        """Remove it."""
        try:
            self._call("delete_object", Key=self._prefix + name)
        except BodyMissing:
            return

    def stored(self, home: str) -> Iterator[Stored]:
        """The bodies of one home. Ages are by the server's clock, which each answer tells."""
        more: dict[str, Any] = {}
        while True:
            answer = self._call("list_objects_v2", Prefix=f"{self._prefix}{home}/", **more)
            clock = _clock(answer)
            for found in answer.get("Contents", ()):
                age = (clock or datetime.now(found["LastModified"].tzinfo)) - found["LastModified"]
                yield Stored(found["Key"].removeprefix(self._prefix), age.total_seconds())
            if not answer.get("IsTruncated"):
                return
            more = {"ContinuationToken": answer["NextContinuationToken"]}

    def _call(self, verb: str, **said: Any) -> Any:
        try:
            return getattr(self._client, verb)(Bucket=self.bucket, **said)
        except Exception as error:
            # Whatever client it is: botocore's errors carry the server's answer, and only "no such key" is about the body.
            answer: dict[str, Any] = getattr(error, "response", None) or {}
            code = str(answer.get("Error", {}).get("Code", ""))
            if code in _ABSENT:
                raise BodyMissing(f"the body {said.get('Key')} is not in bucket {self.bucket}") from error
            raise StoreUnavailable(f"bucket {self.bucket} did not answer to {verb}: {error}") from error


def _clock(answer: Any) -> datetime | None:
    said = answer.get("ResponseMetadata", {}).get("HTTPHeaders", {}).get("date")
    return parsedate_to_datetime(said) if said else None
