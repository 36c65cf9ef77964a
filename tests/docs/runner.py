"""Runs a page as its reader would: blocks from top to bottom, in one namespace, in an empty folder.

* ```` ```python ```` runs; `await` works at the top level. `server=redis` (postgres, mariadb, …) in the info string means
  that the documented address in it is that server's: it is replaced by the address of a private one.
  `file=name.py` puts it into a file of that name instead, for the blocks below to import or run.
* ```` ```text output ```` after it is what it prints, `…` standing for anything.
* ```` ```console ```` holds `$ command` lines, each followed by what it prints. `semel` and `python` are run; what would
  change the machine (pip, ./demo, ./test) is only checked for being there. `exit=2` is the exit code, 0 if not given.
"""

from __future__ import annotations

import ast
import asyncio
import contextlib
import io
import os
import re
import shlex
import subprocess
import sys
import tomllib
import types
from collections.abc import Callable
from inspect import CO_COROUTINE
from pathlib import Path

from tests.docs.markdown import ROOT, Block, blocks, name_of

# The address that the documentation uses after `scheme://`, and whose it is.
ADDRESSES = {
    "redis": "localhost:6379/0",
    "postgres": "app@localhost:5432/app",
    "mariadb": "app@localhost:3306/app",
}
# Other people's plugins that happen to be installed here. No page needs them, and importing them takes longer than its tests.
PYTEST = "-pno:valkey -pno:schemathesis -pno:faker -pno:hypothesispytest -pno:xdist -pno:xdist.looponfail -pno:anyio"
LANGUAGES = {"python", "console", "text", "mermaid", "sql", "ini", "toml", ""}
UrlOf = Callable[[str], str]


def servers(page: Path) -> list[str]:
    found = {block.option("server") for block in blocks(page.read_text("utf-8"))}
    return sorted(name for name in found if name)


class Page:
    """One page being read. `url_of` gives the address of a private server by its name."""

    def __init__(self, path: Path, folder: Path, url_of: UrlOf) -> None:
        self.path = path
        self.folder = folder
        self.module = types.ModuleType(f"page_{path.stem.replace('-', '_')}")
        self._url_of = url_of
        self._urls: dict[str, str] = {}
        self._printed = ""

    def run(self) -> int:
        """Run every block; the number of those that ran."""
        ran = 0
        sys.modules[self.module.__name__] = self.module  # classes of the page look themselves up there
        here = Path.cwd()
        os.chdir(self.folder)
        sys.path.insert(0, str(self.folder))
        try:
            with asyncio.Runner() as loop:
                for block in blocks(self.path.read_text("utf-8")):
                    ran += self._run(block, loop)
        finally:
            os.chdir(here)
            sys.path.remove(str(self.folder))
            del sys.modules[self.module.__name__]
        return ran

    def _run(self, block: Block, loop: asyncio.Runner) -> bool:
        assert block.language in LANGUAGES, f"{name_of(self.path)}:{block.line}: what is {block.language!r}?"
        if block.language == "python":
            self._python(block, loop)
            return True
        if block.language == "console":
            self._console(block)
            return True
        if block.language == "text" and "output" in block.options:
            self._compare(block.line, block.text, self._printed)
        return False

    def _python(self, block: Block, loop: asyncio.Runner) -> None:
        source = self._with_address(block)
        if name := block.option("file"):
            (self.folder / name).write_text(source, "utf-8")
            return
        # The padding makes a traceback name the line of the page.
        code = compile(
            "\n" * (block.line - 1) + source,
            str(self.path),
            "exec",
            flags=ast.PyCF_ALLOW_TOP_LEVEL_AWAIT,
            dont_inherit=True,
        )
        space = vars(self.module)
        printed = io.StringIO()
        with contextlib.redirect_stdout(printed):
            if code.co_flags & CO_COROUTINE:
                loop.run(eval(code, space))
            else:
                exec(code, space)
        self._printed = printed.getvalue()

    def _with_address(self, block: Block) -> str:
        server = block.option("server")
        for name, address in ADDRESSES.items():
            if address in block.text:
                assert name == server, (
                    f"{name_of(self.path)}:{block.line}: say server={name} in the info string"
                )
        if server is None:
            return block.text
        if server not in self._urls:
            self._urls[server] = self._url_of(server).partition("://")[2]
        return block.text.replace(ADDRESSES[server], self._urls[server])

    def _console(self, block: Block) -> None:
        for number, command, wanted in _commands(block):
            words = shlex.split(command)
            if words[0] in ("pip", "uv"):
                _check_install(command)
            elif words[0].startswith("./"):
                assert os.access(ROOT / words[0], os.X_OK), f"{words[0]} cannot be run"
            else:
                self._compare(number, wanted, self._called(words, number, int(block.option("exit") or 0)))

    def _called(self, words: list[str], number: int, code: int) -> str:
        program, *arguments = words
        where = f"{name_of(self.path)}:{number}"
        assert program in ("semel", "python"), f"{where}: {program} is not run by this suite"
        binary = Path(sys.executable).parent / program
        in_clone = bool(arguments) and arguments[0].startswith(("examples/", "docs/"))
        done = subprocess.run(
            [binary, *arguments],
            cwd=ROOT if in_clone else self.folder,
            capture_output=True,
            text=True,
            timeout=110,
            check=False,
            env={
                **os.environ,
                "PYTHONDONTWRITEBYTECODE": "1",
                "PYTEST_ADDOPTS": f"{os.environ.get('PYTEST_ADDOPTS', '')} {PYTEST}",
                "COLUMNS": "110",
                "TERM": "dumb",
                "NO_COLOR": "1",
            },
        )
        printed = done.stdout + done.stderr
        assert done.returncode == code, f"{where}: {program} ended with {done.returncode}:\n{printed}"
        return printed

    def _compare(self, number: int, wanted: str, got: str) -> None:
        pattern = ".*?".join(map(re.escape, _trimmed(wanted).split("…")))
        assert re.fullmatch(pattern, _trimmed(got), re.DOTALL), (
            f"{name_of(self.path)}:{number}: the page says\n{wanted}\nbut it prints\n{got}"
        )


def _trimmed(text: str) -> str:
    return "\n".join(line.rstrip() for line in text.strip().splitlines())


def _commands(block: Block) -> list[tuple[int, str, str]]:
    """(line, command, what it prints) of each `$` line."""
    found: list[tuple[int, str, list[str]]] = []
    for number, line in enumerate(block.text.splitlines(), block.line):
        if line.startswith("$ "):
            found.append((number, line[2:].partition("  # ")[0], []))
        else:
            assert found, "a console block begins with a `$` line"
            found[-1][2].append(line)
    return [(number, command, "\n".join(lines)) for number, command, lines in found]


def extras() -> set[str]:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
    return set(project["optional-dependencies"])


def _check_install(command: str) -> None:
    """An install command may name only extras that there are."""
    for named in re.findall(r"\[([\w,]+)\]", command):
        unknown = set(named.split(",")) - extras()
        assert not unknown, f"{command}: there is no extra {unknown}"
