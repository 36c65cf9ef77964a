"""Which standbys a commit waits for, and what a failover to one of the others would lose. Pure."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Final

__all__ = ["left_out", "wait_for_all"]

# As the documentation of synchronous_standby_names has it: [FIRST | ANY] number (names), or names alone, which is FIRST 1.
_COUNTED: Final = re.compile(r"\s*(?:(?:first|any)\s+)?(?P<number>\d+)\s*\((?P<names>.*)\)\s*", re.IGNORECASE)
_NAME: Final = re.compile(r'"(?:[^"]|"")*"|[^\s,"]+')
_PLAIN: Final = re.compile(r"[A-Za-z0-9_.-]+")


def left_out(settings: Mapping[str, str]) -> str:
    """Why an acknowledged write may be missing on a standby, although `synchronous_standby_names` is set; "" when it is not."""
    standbys, idle = int(settings["standbys"]), int(settings.get("standbys_not_waited_for", "0"))
    number, named = _wanted(settings["synchronous_standby_names"])
    several = max(standbys, 0 if "*" in named else len(named))
    if idle:
        return (
            f"{idle} of {standbys} standbys not waited for (async or potential): a failover to such a one loses acknowledged "
            f"writes; {wait_for_all(settings)}"
        )
    if number < several:
        return (
            f"synchronous_standby_names = '{settings['synchronous_standby_names']}' waits for {number} of {several} standbys: a "
            f"failover to another one loses acknowledged writes; {wait_for_all(settings)}"
        )
    if settings.get("standbys_not_seen", "0") != "0":
        return (
            "this user may not see which standbys are waited for, so nothing is promised about a failover; GRANT "
            "pg_read_all_stats TO this user"
        )
    return ""


def wait_for_all(settings: Mapping[str, str]) -> str:
    """The exact setting. Standbys that share a name, or cannot be seen, cannot be listed."""
    names = _all_names(settings)
    number = max(len(names), int(settings["standbys"]))
    listed = ", ".join(f'"{name}"' for name in names) if len(names) == number else "*"
    return (
        f"ALTER SYSTEM SET synchronous_standby_names = 'FIRST {number} ({listed})' and SELECT pg_reload_conf() (a commit then "
        "waits while one of them is away)"
    )


def _all_names(settings: Mapping[str, str]) -> Sequence[str]:
    """The standbys that are there and the ones that are only listed; empty when that is not known."""
    there = [name for name in settings.get("standby_names", "").split(", ") if name]
    _, named = _wanted(settings["synchronous_standby_names"])
    listed = [] if "*" in named else named
    names = list(dict.fromkeys([*listed, *there]))
    known = len(set(there)) == int(settings["standbys"]) and all(map(_PLAIN.fullmatch, names))
    return names if known else ()


def _wanted(setting: str) -> tuple[int, Sequence[str]]:
    """How many standbys a commit waits for, and of which."""
    counted = _COUNTED.fullmatch(setting)
    number, names = (int(counted["number"]), counted["names"]) if counted else (1, setting)
    return number, [name.strip('"').replace('""', '"') for name in _NAME.findall(names)]
