"""Settings from the environment, a mapping or a file."""

from __future__ import annotations

import inspect
import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from semel import AsyncSemel, ConfigurationError, Semel
from semel.cli.commands import app
from semel.configuring import SETTINGS, settings_from, settings_of_environment
from semel.face import Face
from semel.options import Options

URL = {"SEMEL_URL": "memory://"}


def test_every_setting_is_one_of_a_face() -> None:
    known = set(inspect.signature(Face.__init__).parameters) | set(Options.__struct_fields__) | {"url"}
    assert set(SETTINGS) <= known
    left = (known | {"self"}) - set(SETTINGS)
    assert left == {"self", "store", "hooks", "encrypt", "options", "result_type"}


@pytest.mark.parametrize(
    ("name", "text", "value"),
    [
        ("lease", "30s", 30.0),
        ("lease", "500ms", 0.5),
        ("lease", "2.5", 2.5),
        ("retention", "7d", 604_800.0),
        ("retention", "none", None),
        ("wait", "5 min", 300.0),
        ("threads", "8", 8),
        ("enabled", "off", False),
        ("coalesce", "True", True),
        ("index", "ref, trace", ["ref", "trace"]),
        ("tenant", "acme", "acme"),
        ("wait", "inf", math.inf),
        ("retention", "inf", None),
        ("poll", "5ms, 1s", [0.005, 1.0]),
        ("max_waiters", "5", 5),
        ("compress_over", "4096", 4096),
        ("compress_over", "none", None),
        ("inline", "yes", True),
        ("fingerprints", "required", "required"),
        ("on_lease_lost", "warn", "warn"),
        ("ref_type", "ord", "ord"),
    ],
)
def test_a_text_becomes_what_the_setting_takes(name: str, text: str, value: Any) -> None:
    assert settings_of_environment({**URL, f"SEMEL_{name.upper()}": text}, "SEMEL_")[name] == value
    assert settings_from({"url": "memory://", name: text}, "semel")[name] == value


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("LEASE", "soon"),
        ("LEASE", "5 weeks"),
        ("THREADS", "many"),
        ("ENABLED", "maybe"),
        ("COMPRESS_OVER", "much"),
        *(
            (name, text)
            for name in ("LEASE", "WAIT", "TOMBSTONE", "RETENTION", "COMPRESS_OVER")
            for text in ("", " ")
        ),
    ],
)
def test_what_cannot_be_understood_is_named(name: str, text: str) -> None:
    with pytest.raises(ConfigurationError, match=f"SEMEL_{name}='{text}' cannot be understood"):
        settings_of_environment({**URL, f"SEMEL_{name}": text}, "SEMEL_")


@pytest.mark.parametrize(
    ("name", "says"), [("retention", "as 30s or 7d"), ("compress_over", "bytes, or none")]
)
def test_a_setting_that_says_nothing_is_no_word_for_none(name: str, says: str) -> None:
    with pytest.raises(ConfigurationError, match=f"{name}='' cannot be understood: write .*{says}"):
        Semel.from_config({"url": "memory://", name: ""})


def test_typos_are_refused_and_strangers_left_alone() -> None:
    with pytest.raises(ConfigurationError, match="did you mean SEMEL_RETENTION"):
        Semel.from_env(environ={**URL, "SEMEL_RETENSION": "1"})
    with pytest.raises(ConfigurationError, match="did you mean 'lease'"):
        Semel.from_config({"url": "memory://", "leese": 1})
    with pytest.raises(ConfigurationError, match="settings are"):
        Semel.from_config({"url": "memory://", "colour": "red"})
    with pytest.raises(ConfigurationError, match="SEMEL_URL is not set"):
        Semel.from_env(environ={})
    with pytest.raises(ConfigurationError, match='needs "url"'):
        AsyncSemel.from_config({})
    with Semel.from_env(environ={**URL, "SEMEL_TEST": "full", "PATH": "/bin"}, lease=3) as once:
        assert once.execute("k", lambda: 1).value == 1


@pytest.mark.parametrize("name", ["hooks", "encrypt", "result_type"])
def test_what_only_the_program_can_give_is_not_dropped(name: str) -> None:
    with pytest.raises(
        ConfigurationError, match=r"given by the program, not by the environment: from_env\(…, "
    ):
        Semel.from_env(environ={**URL, f"SEMEL_{name.upper()}": "x"})


def test_where_a_program_has_its_own_settings_from_is_its_own_affair() -> None:
    keys = {"2026-a": bytes(32)}
    Semel.from_env(environ={**URL, "SEMEL_ENCRYPT": "00" * 32}, encrypt=keys).close()
    with pytest.raises(ConfigurationError, match="SEMEL_HOOKS: hooks is given by the program"):
        Semel.from_env(environ={**URL, "SEMEL_HOOKS": "1"}, encrypt=keys)
    for variable in ("SEMEL_ENCRYPTION", "SEMEL_HOOK", "SEMEL_RESULT_TYPES"):
        Semel.from_env(environ={**URL, variable: "1"}).close()


def test_a_configuration_cannot_say_what_only_the_program_can_give() -> None:
    with pytest.raises(ConfigurationError, match=r"'hooks': hooks is given by the program.*from_config\("):
        Semel.from_config({"url": "memory://", "hooks": []})


def test_texts_reach_the_face_as_settings() -> None:
    more = {"SEMEL_POLL": "1ms,2ms", "SEMEL_WAIT": "inf", "SEMEL_FINGERPRINTS": "required"}
    with (
        Semel.from_env(environ={**URL, **more}) as once,
        pytest.raises(ConfigurationError, match='fingerprints="required"'),
    ):
        once.execute("k", lambda: 1)
    with pytest.raises(ConfigurationError, match="poll must be a pair"):
        Semel.from_env(environ={**URL, "SEMEL_POLL": "1ms"})


def test_a_file_has_sections(tmp_path: Path) -> None:
    toml, data = tmp_path / "app.toml", tmp_path / "app.json"
    toml.write_text('[tool.semel]\nurl = "memory://"\nlease = 7\n')
    data.write_text(json.dumps({"semel": {"url": "memory://", "retention": None}}))
    assert settings_from(toml, "tool.semel") == {"url": "memory://", "lease": 7}
    assert settings_from(str(data), "semel") == {"url": "memory://", "retention": None}
    for wrong, words in (
        (toml, r"has no section \[semel\]"),
        (tmp_path / "none.toml", "cannot be read"),
        (_broken(tmp_path), "is no TOML or JSON"),
    ):
        with pytest.raises(ConfigurationError, match=words):
            settings_from(wrong, "semel")


def _broken(folder: Path) -> Path:
    path = folder / "broken.toml"
    path.write_text("[semel")
    return path


def test_the_command_hides_what_is_secret(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SEMEL_URL", "redis://user:hunter2@host/0")
    monkeypatch.setenv("SEMEL_SECRET", "hunter3-hunter3-hunter3")
    done = CliRunner().invoke(app, ["config"])
    assert done.exit_code == 0, done.output
    assert done.output == "secret = …\nurl = redis://user:***@host/0\n"


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: Semel.from_config(None), "a configuration is a mapping, or the path .* not NoneType"),  # type: ignore[arg-type]
        (lambda: Semel.from_config(b"x.toml"), "not bytes"),  # type: ignore[arg-type]
        (lambda: Semel.from_config({5: 1, "url": "memory://"}), "names its settings by text, not by 5"),  # type: ignore[dict-item]
        (lambda: Semel.from_config({}, store="memory://", url="memory://"), "named by url=, here as"),
        (lambda: Semel.from_env(None, environ=URL), "prefix= is the text that variables begin with"),  # type: ignore[arg-type]
        (lambda: Semel.from_env(environ=URL, store="memory://"), "named by url="),
    ],
)
def test_what_is_no_configuration_is_told(make: Callable[[], Semel], words: str) -> None:
    with pytest.raises(ConfigurationError, match=words):
        make()


def test_a_file_that_is_too_deep_is_told(tmp_path: Path) -> None:
    deep = tmp_path / "deep.json"
    deep.write_text("[" * 100_000)
    with pytest.raises(ConfigurationError, match="is no TOML or JSON"):
        settings_from(deep, "semel")


def test_the_program_may_name_the_store() -> None:
    Semel.from_env(environ={}, url="memory://").close()
    Semel.from_config({"lease": 7}, url="memory://").close()
