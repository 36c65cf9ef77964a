"""The reference is complete: what the code has, the pages say, and nothing else."""

from __future__ import annotations

import inspect
import re
from pathlib import Path
from typing import Any

import pytest
import typer.main

import semel
from docs import generate
from semel import errors, hooks, model, store
from semel.cli.commands import app
from semel.face import Face
from semel.guarantees import Guarantee
from semel.options import Options
from tests.docs.markdown import ROOT, name_of, rows, section
from tests.docs.runner import extras

REFERENCE = ROOT / "docs" / "reference"
# Parts of a Run that have no underscore and are nevertheless the flow's own.
MACHINERY = {
    *(
        "all_steps",
        "ask",
        "busy",
        "call",
        "check_process",
        "detached",
        "due",
        "epoch",
        "foreign",
        "in_flight",
        "inherits_ref",
        "interrupt",
        "is_kept_by",
        "leave",
        "left",
        "minted",
        "parent",
        "policy",
        "secret_id",
        "settling",
        "started",
        "weak",
        "stuck",
        "summary",
        "unheard",
        "threads",
        "token",
        "won_at",
    )
}
ONE_CALL = {"request", "fields", "fingerprint", "kwargs", "labels", "readable"}


def page(name: str) -> str:
    return (REFERENCE / name).read_text("utf-8")


def test_every_setting_of_a_face_is_documented_with_its_default() -> None:
    wanted = {
        name: f"`{parameter.default!r}`"
        for name, parameter in inspect.signature(Face.__init__).parameters.items()
        if parameter.kind is parameter.KEYWORD_ONLY
    }
    documented = rows(section(page("options.md"), "Of a face"))
    assert {name: cells[0] for name, cells in documented.items()} == wanted


def test_every_option_of_a_call_is_documented_with_its_default() -> None:
    defaults = zip(Options.__struct_fields__, Options.__struct_defaults__, strict=True)
    documented = rows(section(page("options.md"), "Of a call"))
    assert {name: cells[0] for name, cells in documented.items()} == {
        name: f"`{default!r}`" for name, default in defaults
    }


def test_every_argument_of_one_call_is_documented() -> None:
    assert set(rows(section(page("options.md"), "Of one call only"))) == ONE_CALL
    taken = set(re.findall(r'given\.pop\("(\w+)"', inspect.getsource(Face._call)))
    assert taken == ONE_CALL


def test_every_error_is_documented() -> None:
    assert set(rows(page("errors.md"))) == set(errors.__all__)


def test_every_attribute_of_an_error_is_documented() -> None:
    documented = rows(page("errors.md"))
    for name in errors.__all__:
        own = inspect.signature(getattr(errors, name).__init__).parameters
        kept = {each for each in own if each not in {"self", "args", "kwargs"}} - {"message"}
        missing = {each for each in kept if f"`{each}`" not in documented[name][0]}
        assert not missing, f"{name}: {missing}"


def test_every_public_name_is_documented() -> None:
    everything = "".join(path.read_text("utf-8") for path in sorted(REFERENCE.glob("*.md")))
    missing = [name for name in semel.__all__ if not re.search(rf"\b{name}\b", everything)]
    assert missing == []


@pytest.mark.parametrize(
    "title, kinds",
    [
        ("Semel and AsyncSemel", (semel.Semel, semel.AsyncSemel)),
        ("Outcome", (semel.Outcome,)),
        ("Run", (semel.Run,)),
        ("Record", (model.Record,)),
        ("Guarantee", (Guarantee,)),
        ("Requests and ids", (semel.PublicId,)),
    ],
)
def test_every_name_of_a_class_is_documented(title: str, kinds: tuple[type, ...]) -> None:
    text = section(page("api.md"), title)
    for kind in kinds:
        missing = [name for name in public(kind) if not re.search(rf"`[^`]*\b{name}\b[^`]*`", text)]
        assert missing == [], f"{kind.__name__}: {missing}"


def public(kind: type) -> set[str]:
    """What a user may touch. Machinery that only has no underscore is named here, so that it does not grow in silence."""
    machinery = MACHINERY if kind is semel.Run else set()
    return {name for name in dir(kind) if not name.startswith("_")} - machinery


def test_every_name_of_a_claim_is_documented() -> None:
    claim: Any = semel.Semel("memory://").claim("k")
    text = section(page("api.md"), "Claim")
    missing = [name for name in dir(claim) if not name.startswith("_") and f"`{name}" not in text]
    assert missing == []


def test_every_command_is_documented() -> None:
    documented = set(re.findall(r"^## `semel ([\w ]+)`", page("cli.md"), re.MULTILINE))
    assert documented == set(_commands(typer.main.get_command(app), ""))


def _commands(command: Any, name: str) -> list[str]:
    inner = getattr(command, "commands", None)
    if inner is None:
        return [name]
    return [full for part, each in inner.items() for full in _commands(each, f"{name} {part}".strip())]


def test_every_option_of_a_command_is_documented() -> None:
    root: Any = typer.main.get_command(app)
    for full in _commands(root, ""):
        command = root
        for part in full.split():
            command = command.commands[part]
        text = section(page("cli.md"), f"`semel {full}`")
        for parameter in command.params:
            spelled = parameter.opts[0] if parameter.opts[0].startswith("-") else parameter.opts[0].upper()
            assert f"`{spelled}`" in text, f"semel {full}: {spelled}"


def test_every_extra_is_in_the_readme() -> None:
    assert set(rows(section((ROOT / "README.md").read_text("utf-8"), "Install"))) == extras()


def test_every_capability_and_every_scheme_is_documented() -> None:
    documented = rows(page("stores.md"))
    assert set(store.Capabilities.__struct_fields__) <= set(documented)
    assert set(rows(section(page("stores.md"), "URLs"))) == set(store._SCHEMES)


def test_every_event_is_documented_and_has_a_level() -> None:
    guide = (ROOT / "docs" / "howto" / "hooks-and-logging.md").read_text("utf-8")
    events = {
        name
        for name, event in vars(hooks).items()
        if isinstance(event, type)
        and hasattr(event, "__dataclass_fields__")
        and event is not hooks.HookEvent
        and event.__module__ == hooks.__name__
    }
    assert set(rows(section(guide, "Events"))) == events == {event.__name__ for event in hooks._LEVELS}


@pytest.mark.parametrize("path", generate.pages(), ids=name_of)
def test_generated_parts_are_as_the_code_has_them(path: Path) -> None:
    text = path.read_text("utf-8")
    assert generate.renewed(text) == text, "run: python docs/generate.py"


def test_every_generated_part_is_used() -> None:
    text = "".join(path.read_text("utf-8") for path in generate.pages())
    assert set(re.findall(r"<!-- generated: (\S+) -->", text)) == set(generate.PARTS)


def test_every_verdict_state_and_word_of_the_model_is_in_the_glossary_or_the_states_page() -> None:
    concepts = ROOT / "docs" / "concepts"
    text = "".join((concepts / name).read_text("utf-8") for name in ("glossary.md", "states.md"))
    verdicts = [kind.__name__ for kind in model.Verdict.__args__]
    words = [*verdicts, *model.State, *model.Policy]
    assert [word for word in words if not re.search(rf"\b{word}\b", text)] == []
