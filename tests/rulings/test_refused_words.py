"""What is malformed, or comes too late, is refused where it is said, in words that name the remedy."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from multiprocessing.reduction import ForkingPickler
from typing import Any

import pytest

from semel import (
    AsyncSemel,
    ConfigurationError,
    InProgress,
    InvalidKey,
    KeyMismatch,
    Release,
    Run,
    Semel,
    SemelWarning,
    current_run,
)
from semel.store import Settings as StoreSettings
from semel.store import open_store

from .conftest import Lab


@pytest.mark.parametrize("error", [5, "", "  ", None])
def test_R6_a_failure_says_what_went_wrong(error: Any) -> None:
    with Semel("memory://") as once, once.claim("k") as claim:
        with pytest.raises(ConfigurationError, match=r"claim.fail\(…\) takes an exception, or a text"):
            claim.fail(error)
        claim.fail("declined")  # the first one did not answer it


@pytest.mark.parametrize("error", [5, "", "  "])
def test_R13_so_does_the_word_of_a_person(error: Any) -> None:
    with Semel("memory://") as once:
        with pytest.raises(SystemExit):
            once.execute("k", _exits, on_unknown="hold")
        with pytest.raises(ConfigurationError, match=r"resolve\(error=…\) takes an exception, or a text"):
            once.resolve("k", error=error)
        assert once.peek("k").state == "unknown"  # type: ignore[union-attr]  # it is there


def _exits() -> None:
    raise SystemExit


@pytest.mark.parametrize("after", [-1, -0.5, "x", None, True, float("inf"), float("nan")])
def test_R9_a_release_is_checked_when_it_is_made(after: Any) -> None:
    with pytest.raises(ConfigurationError, match=r"Release\(after"):
        Release(after=after)


def test_R25_a_ref_is_refused_after_the_end() -> None:
    runs: list[Run] = []
    with Semel("memory://") as once:
        once.execute("k", lambda: runs.append(current_run()))
        with pytest.raises(ConfigurationError, match="has ended: it takes no ref any more"):
            runs[0].set_ref("ord_1")
        assert once.peek("k").ref is None  # type: ignore[union-attr]  # it is there


async def test_R26_a_step_without_a_name_is_told_of_its_name(light_lab: Lab) -> None:
    once = light_lab.face()
    for wrong, says in (
        ("", "the name of a step is empty"),
        (5, "the name of a step must be a str, not int"),
    ):

        def plain(name: Any = wrong) -> Any:
            return current_run().step(name, int)

        with pytest.raises(InvalidKey, match=says):
            await light_lab.do(once.execute("k", light_lab.fn(plain)))


@pytest.mark.parametrize("name", ["tenant", "prefix", "operation"])
def test_R21_none_is_no_name_and_leaving_it_out_is_the_default(name: str) -> None:
    nothing: dict[str, Any] = {name: None}
    with pytest.raises(
        InvalidKey, match=f"{name} must be a str, not NoneType: pass the text, or leave it out"
    ):
        Semel("memory://", **nothing)


@pytest.mark.parametrize(
    ("url", "says"),
    [
        (" sqlite:///semel.db", "begins with its scheme, and this one with a space: ' sqlite'"),
        (" redis://:hunter2@host", "begins with its scheme, and this one with a space: ' redis'$"),
        ("redis://host:99999", "is not a number from 1 to 65535"),
        ("redis://host:0", "is not a number from 1 to 65535"),
        ("postgresql+psycopg://host:0/db", "must be a number from 1 to 65535"),
        ("redis+cluster://one:0,two:1", "number 1 of the hosts .* with a port from 1 to 65535"),
        ("sqlite:///t\ud800.db", "cannot be a file name here"),
        ("redis+cluster://one:1,two:99999", "number 2 of the hosts .* with a port from 1 to 65535"),
    ],
)
def test_a_url_that_is_nearly_one_is_told_what_is_wrong_with_it(url: str, says: str) -> None:
    with pytest.raises(ConfigurationError, match=says):
        open_store(url, StoreSettings(), "sync")


@pytest.mark.parametrize("face", [Semel, AsyncSemel])
@pytest.mark.parametrize("way", [copy.deepcopy, copy.copy, ForkingPickler.dumps])
def test_R29_a_face_is_made_in_each_process_not_copied(
    face: Callable[..., Any], way: Callable[..., Any], recwarn: pytest.WarningsRecorder
) -> None:
    with pytest.raises(TypeError, match=r"cannot be copied or pickled.*Make a face in each process"):
        way(face("memory://"))
    assert list(recwarn) == []


def test_R8_a_face_that_is_switched_off_says_so_to_whoever_looks() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", SemelWarning)
        once = Semel("memory://", enabled=False)
    looks: list[Callable[[], Any]] = [lambda: once.peek("k"), once.find, lambda: once.history("k")]
    for look in looks:
        with pytest.warns(SemelWarning, match=r"switched off.*keeps no records") as said:
            assert not look()
        assert said[0].filename == __file__
    assert once.guarantee().warnings == ("enabled=False: nothing is protected",)
    once.close()


def test_R7_an_unknown_option_of_a_look_is_told_those_that_count() -> None:
    with Semel("memory://") as once:
        for look in (once.peek, once.history):
            with pytest.raises(
                ConfigurationError,
                match=r"did you mean 'tenant'\? A key is named by its text and operation, tenant$",
            ):
                look("k", tennant="acme")  # type: ignore[call-arg]  # that is the mistake
        with pytest.raises(ConfigurationError, match="result_type, retention"):
            once.resolve("k", value=1, tennant="acme")  # type: ignore[call-arg]  # that is the mistake
        with pytest.raises(
            ConfigurationError, match=r"unknown option 'actr': did you mean 'actor'\?.*actor, correct,.*value"
        ):
            once.resolve("k", value=1, actr="ann")  # type: ignore[call-arg]  # that is the mistake
        with pytest.raises(
            ConfigurationError,
            match=r"did you mean 'reason'\?.*the others here are actor, reason, retention$",
        ):
            once.forget("k", reson="by mistake")  # type: ignore[call-arg]  # that is the mistake
        with pytest.raises(ConfigurationError, match=r"unknown option 'foo': A key is named"):
            once.forget("k", foo=1)  # type: ignore[call-arg]  # that is the mistake


def test_R7_a_label_that_is_named_as_semels_own_is_refused() -> None:
    with (
        Semel("memory://") as once,
        pytest.raises(ConfigurationError, match=r"the label 'semel\.sealed' begins with 'semel\.'"),
    ):
        once.execute("k", int, labels={"semel.sealed": "mine"})


class NoTruth:
    """As an array of numpy, which no comparison tells the truth of."""

    __hash__ = None  # type: ignore[assignment]

    def __eq__(self, other: object) -> bool:
        raise ValueError("the truth value is ambiguous")

    def __bool__(self) -> bool:
        raise ValueError("the truth value is ambiguous")


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"labels": {"": "b"}}, "a label has no name: give 'b' one"),
        (
            {"fields": 5, "request": {"a": 1}},
            "fields= must be a sequence of field paths .* not int: name the fields",
        ),
        ({"fields": NoTruth(), "request": {"a": 1}}, "fields= must be a sequence .* not NoTruth"),
        ({"fields": (), "request": {"a": 1}}, "fields= must be a sequence .* not an empty one"),
        ({"fields": "a", "request": {"a": 1}}, "fields= must be a sequence .* not str"),
        ({"on_unknown": NoTruth()}, "on_unknown must be"),
        ({"on_error": NoTruth()}, "on_error must be"),
        ({"readable": NoTruth()}, "readable must be"),
        ({"lease": -1}, r"lease must be between 0\.05 seconds"),
    ],
)
def test_R7_an_option_of_the_wrong_kind_is_refused_with_the_remedy(
    options: dict[str, Any], says: str
) -> None:
    with Semel("memory://") as once, pytest.raises(ConfigurationError, match=says):
        once.execute("k", int, **options)


def test_R22_fields_that_can_be_read_but_once_are_read_when_decorating() -> None:
    with Semel("memory://") as once:
        with pytest.raises(ConfigurationError, match="fields= must be a sequence"):
            once(key="order.id", request="order", fields=5)  # type: ignore[arg-type]  # that is the mistake
        decorated = once(key="order.id", request="order", fields=iter(["sum"]), operation="x")(
            lambda order: 1
        )
        decorated({"id": "1", "sum": 1, "trace": 1})
        decorated({"id": "1", "sum": 1, "trace": 2})
        with pytest.raises(KeyMismatch):
            decorated({"id": "1", "sum": 2})


def test_R6_verdicts_is_a_switch() -> None:
    with (
        Semel("memory://") as once,
        pytest.raises(ConfigurationError, match="verdicts must be True or False"),
    ):
        once.claim("k", verdicts=1)  # type: ignore[arg-type]


def test_R13_a_live_run_is_not_resolved_and_says_when_it_can_be() -> None:
    with (
        Semel("memory://") as once,
        once.claim("k") as claim,
    ):
        with pytest.raises(
            InProgress, match="can be resolved; wait until it has ended, or its lease is over"
        ):
            once.resolve("k", value=1)
        claim.complete()


async def test_R26_an_unknown_option_of_a_step_is_told_those_it_has(light_lab: Lab) -> None:
    def plain() -> Any:
        run: Any = current_run()
        return run.step("charge", int, amount=5)

    once = light_lab.face()
    with pytest.raises(ConfigurationError, match=r"'amount' of step 'charge': .*as kwargs=\{\.\.\.\}"):
        await light_lab.do(once.execute("k", light_lab.fn(plain)))
