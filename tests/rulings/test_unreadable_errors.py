"""R2, R9: what cannot even be printed does not take the place of an outcome."""

from __future__ import annotations

import logging
import warnings
from typing import Any

import pytest

from semel import ConfigurationError, OutcomeUnknown, SemelWarning
from semel.hooks import log_events
from semel.shown import shown

from .conftest import Lab


class Silent(Exception):
    """As an error of a client whose `response` is set later."""

    def __repr__(self) -> str:
        raise RuntimeError("no response yet")

    __str__ = __repr__


class SilentAnswer:
    def __repr__(self) -> str:
        raise RuntimeError("no response yet")


def test_what_has_no_repr_is_told_by_its_class() -> None:
    assert shown("a") == "'a'"
    assert shown(Silent()) == "<Silent>"


def _raises(error: Exception) -> Any:
    raise error


@pytest.mark.parametrize("decide", [_raises, lambda _: SilentAnswer()])
async def test_R9_an_on_error_that_fails_without_words_holds_the_key(light_lab: Lab, decide: Any) -> None:
    lab, own = light_lab, Silent()
    once = lab.face()
    with pytest.raises(Silent) as caught:
        await lab.do(once.execute("k", lab.raising(own), on_error=decide))
    assert caught.value is own
    (note,) = own.__notes__
    assert "on_error could not decide" in note
    assert "<Silent" in note
    assert (await lab.do(once.peek("k"))).state == "unknown"


@pytest.mark.parametrize("name", ["StoreCalled", "Executed", "Replayed", "Failed"])
async def test_a_hook_that_fails_without_words_breaks_no_call(light_lab: Lab, name: str) -> None:
    def hook(event: object) -> None:
        if type(event).__name__ == name:
            raise Silent

    lab = light_lab
    once = lab.face(hooks=[hook])
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        for _ in range(2):
            assert (await lab.do(once.execute("k", lab.effect()))).value == "done"
        with pytest.raises(ValueError, match="own"):
            await lab.do(once.execute("bad", lab.raising(ValueError("own"))))
    assert len(lab.effects) == 2
    ignored = [str(each.message) for each in told if each.category is SemelWarning]
    assert ignored
    assert all(text.endswith("raised <Silent>; it was ignored") for text in ignored)


async def test_an_error_without_words_is_logged_by_its_class(
    light_lab: Lab, caplog: pytest.LogCaptureFixture
) -> None:
    lab = light_lab
    once = lab.face(hooks=[log_events])
    with caplog.at_level(logging.WARNING, "semel"), pytest.raises(Silent):
        await lab.do(once.execute("k", lab.raising(Silent())))
    assert "error=Silent: <it has no readable text>" in caplog.text


async def test_R11_an_answer_of_a_probe_without_words_is_refused_by_its_class(light_lab: Lab) -> None:
    lab = light_lab
    once = lab.face()
    with pytest.raises(ValueError, match="lost"):
        await lab.do(once.execute("k", lab.raising(ValueError("lost")), on_unknown="hold"))
    with pytest.raises(ConfigurationError, match="not <SilentAnswer>; the key stays unknown"):
        await lab.do(once.execute("k", lab.effect(), on_unknown=lambda: SilentAnswer()))
    with pytest.raises(OutcomeUnknown):
        await lab.do(once.execute("k", lab.effect(), on_unknown="hold"))
