"""Bodies as files of a folder that all programs share."""

from __future__ import annotations

import os
import secrets
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Final, Self
from urllib.parse import unquote, urlsplit

from semel.bodies.store import BodyMissing, Stored
from semel.errors import ConfigurationError, StoreUnavailable

__all__ = ["FileBodies"]

_UNDER_WAY: Final = ".part"


class FileBodies:
    """`folder/HOME/ab/abcd…`: written beside its place, synced, then renamed, so that a name is all of it or not there."""

    def __init__(self, folder: str | os.PathLike[str]) -> None:
        self.folder = Path(folder)
        if not self.folder.is_absolute():
            raise ConfigurationError(
                f"the folder of bodies must be an absolute path, not {os.fspath(folder)!r}: two programs may have two "
                "working folders"
            )

    @classmethod
    def from_url(cls, url: str) -> Self:
        """From `file:///folder`. The folder is made when it is not there; the one it lies in must be."""
        parts = urlsplit(url)
        if parts.netloc or parts.query or parts.path in {"", "/"}:
            raise ConfigurationError(f"a folder of bodies is file:///folder, three slashes, not {url!r}")
        return cls(unquote(parts.path))

    def _path(self, name: str) -> Path:
        home, _, digest = name.partition("/")
        if not (
            home.isalnum() and digest.isalnum()
        ):  # a reference comes from outside: no way out of the folder
            raise BodyMissing(f"{name[:100]!r} is no name of a body")
        return self.folder / home / digest[:2] / digest

    def put(self, name: str, data: bytes) -> None:
        """Keep it: on disk, its directory entry included, when this returns."""
        path = self._path(name)
        try:
            if _holds(path, data):
                _sync(path.parent)  # another writer may have renamed it just now, and not come to this
                return
            self._folders(path.parent)
            beside = path.with_name(f"{path.name}.{secrets.token_hex(4)}{_UNDER_WAY}")
            try:
                with beside.open("xb") as file:
                    file.write(data)
                    file.flush()
                    os.fsync(file.fileno())
                beside.rename(path)
            except BaseException:
                beside.unlink(missing_ok=True)
                raise
            _sync(path.parent)
        except OSError as error:
            raise StoreUnavailable(f"the folder {self.folder} did not take a body: {error}") from error

    def _folders(self, folder: Path) -> None:
        """Make what is missing up to the store's own folder, each entry synced; above it nothing is made."""
        missing = [step for step in (folder, *folder.parents) if not step.exists()]
        for step in reversed(
            [step for step in missing if step == self.folder or self.folder in step.parents]
        ):
            step.mkdir(exist_ok=True)
            _sync(step.parent)

    def get(self, name: str) -> bytes:
        """The body. A folder that is not there at all (a disk that is not mounted) is StoreUnavailable, not a missing body."""
        path = self._path(name)
        try:
            return path.read_bytes()
        except FileNotFoundError as error:
            if not self.folder.is_dir():
                raise StoreUnavailable(f"the folder {self.folder} is not there") from error
            raise BodyMissing(f"the body {name} is not in {self.folder}") from error
        except OSError as error:
            raise StoreUnavailable(f"the folder {self.folder} did not answer: {error}") from error

    def delete(self, name: str) -> None:
        """Remove it."""
        try:
            self._path(name).unlink(missing_ok=True)
        except OSError as error:
            raise StoreUnavailable(f"the folder {self.folder} did not give up a body: {error}") from error

    def stored(self, home: str) -> Iterator[Stored]:
        """The bodies of one home, and what writers that died left of them."""
        clock = time.time()
        try:
            for folder in _entries(self.folder / home):
                for entry in _entries(folder):
                    age = clock - entry.stat().st_mtime
                    if entry.suffix != _UNDER_WAY:
                        yield Stored(f"{home}/{entry.name}", age)
                    elif age > 86_400:
                        entry.unlink(missing_ok=True)
        except FileNotFoundError:
            return  # it went while it was looked at
        except OSError as error:
            raise StoreUnavailable(f"the folder {self.folder} did not answer: {error}") from error


def _holds(path: Path, data: bytes) -> bool:
    """Whether it is there as it should be: a disk may have damaged it, and whoever has the right bytes repairs it."""
    try:
        return path.stat().st_size == len(data) and path.read_bytes() == data
    except FileNotFoundError:
        return False


def _entries(folder: Path) -> list[Path]:
    return sorted(folder.iterdir()) if folder.is_dir() else []


def _sync(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
