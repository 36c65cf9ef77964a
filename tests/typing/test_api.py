"""What the checkers accept also works: the typed file runs."""

from __future__ import annotations

import asyncio
from inspect import signature

from semel import Semel, face, typed
from semel.face import Face
from semel.options import OF_A_CALL, Options
from tests.typing import api


def test_the_typed_api_runs() -> None:
    api.sync_calls()
    api.inside_a_run()
    api.decorated()
    api.requests_and_ids()
    api.errors()
    api.stores_and_hooks()
    asyncio.run(api.async_calls())
    asyncio.run(api.async_decorated())


def test_the_checkers_know_the_options_that_the_code_knows() -> None:
    of_a_call = {*Options.__struct_fields__, *OF_A_CALL}
    assert typed.CallOptions.__optional_keys__ == of_a_call
    own = {"key", "request", "method"}
    assert typed.DecoratorOptions.__optional_keys__ == of_a_call - {"fingerprint", "kwargs"} | own
    named = signature(Face.__init__).parameters
    assert typed.Conduct.__optional_keys__ == {*Options.__struct_fields__} - {*named}
    assert typed.Place.__optional_keys__ == face.PLACE
    assert typed.Forgetting.__optional_keys__ == face.FORGETS - {*signature(Semel.forget).parameters}
    assert typed.Resolving.__optional_keys__ == face.RESOLVES - {*signature(Semel.resolve).parameters}
    assert typed.Recovering.__optional_keys__ == face._RECOVERS
