"""The page says what the code has, and nothing else."""

from __future__ import annotations

from docs import generate
from semel import grpc as package
from semel.grpc.policy import Options
from semel.grpc.rules import Method, Rules
from tests.docs.markdown import ROOT, rows, section

PAGE = ROOT / "docs" / "reference" / "grpc.md"


def test_every_name_is_documented() -> None:
    assert set(rows(section(PAGE.read_text("utf-8"), "Names"))) == set(package.__all__)


def test_every_option_is_documented_with_its_default() -> None:
    documented = rows(section(PAGE.read_text("utf-8"), "Options"))
    assert documented.keys() == Options.__annotations__.keys()
    defaults = dict(zip(Rules.__struct_fields__, Rules.__struct_defaults__, strict=True))
    for name in documented.keys() & defaults.keys():
        assert documented[name][0] == f"`{defaults[name]!r}`", name


def test_every_option_of_a_method_is_documented() -> None:
    text = rows(section(PAGE.read_text("utf-8"), "Names"))["Method"][0]
    assert [name for name in Method.__struct_fields__ if f"`{name}`" not in text] == []


def test_the_generated_tables_are_up_to_date() -> None:
    text = PAGE.read_text("utf-8")
    assert generate.renewed(text) == text
