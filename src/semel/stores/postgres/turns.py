"""Batches: in which order and in which company items travel, and how one that fails fails alone."""

from __future__ import annotations

from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from typing import Final, Protocol, TypeVar, cast

from semel.errors import ConfigurationError, SemelError, StoreUnavailable
from semel.keys import Scope
from semel.stores.postgres.errors import Trouble

__all__ = ["MOST", "A", "I", "Item", "Step", "in_turns", "settled"]

MOST: Final = 256  # items a statement carries at most


class Item(Protocol):
    @property
    def scope(self) -> Scope: ...


I = TypeVar("I", bound=Item)  # noqa: E741 - an item
A = TypeVar("A")  # an answer or an exception: what the step's list holds

Step = Callable[[list[I], float], Awaitable[list[A]]]


def _company(_: object) -> bool:
    return False


async def in_turns(
    items: Sequence[I],
    step: Step[I, A],
    deadline: float,
    where: str,
    *,
    alone: Callable[[I], bool] = _company,
) -> list[A]:
    """Give `step` the items, each scope once at a time and in the order of scopes; answers in the order of items.

    A step that fails for a group is tried for each of its members. What fails then stands in that member's place;
    only when the store failed all of them is it raised.
    """
    if len(items) == 1:
        answers = await _each([items[0]], step, deadline, where)
    else:
        answers = await _many(items, step, deadline, where, alone)
    if answers and all(isinstance(answer, StoreUnavailable | ConfigurationError) for answer in answers):
        raise cast("Exception", answers[0])
    return answers


async def _many(
    items: Sequence[I], step: Step[I, A], deadline: float, where: str, alone: Callable[[I], bool]
) -> list[A]:
    found: dict[int, A] = {}
    for group in _groups(items, alone):
        members = [items[at] for at in group]
        try:
            answers = await step(members, deadline)
        except (Trouble, SemelError, ValueError) as error:
            if isinstance(error, StoreUnavailable | ConfigurationError):
                answers = [cast("A", error)] * len(group)
            else:
                answers = await _each(members, step, deadline, where)
        found.update(zip(group, answers, strict=True))
    return [found[at] for at in range(len(items))]


async def _each(items: list[I], step: Step[I, A], deadline: float, where: str) -> list[A]:
    answers: list[A] = []
    for item in items:
        try:
            answers += await step([item], deadline)
        except (Trouble, SemelError, ValueError) as error:
            answers.append(cast("A", settled(error, where)))
    return answers


def settled(error: Exception, where: str) -> Exception:
    """What stands in an item's place."""
    return error.told(where) if isinstance(error, Trouble) else error


def _groups(items: Sequence[I], alone: Callable[[I], bool]) -> list[list[int]]:
    """Places of items, grouped: the n-th mention of a scope in the n-th round, sorted, at most MOST together."""
    hashes = [item.scope.hash for item in items]
    if 0 < len(set(hashes)) == len(hashes) <= MOST and not any(map(alone, items)):  # as nearly always
        return [sorted(range(len(hashes)), key=hashes.__getitem__)]
    seen: Counter[bytes] = Counter()
    rounds: list[list[int]] = []
    for at, item in enumerate(items):
        turn = seen[item.scope.hash]
        seen[item.scope.hash] += 1
        if turn == len(rounds):
            rounds.append([])
        rounds[turn].append(at)
    groups: list[list[int]] = []
    for places in rounds:
        places.sort(key=lambda at: items[at].scope.hash)
        together = [at for at in places if not alone(items[at])]
        groups += [together[start : start + MOST] for start in range(0, len(together), MOST)]
        groups += [[at] for at in places if alone(items[at])]
    return groups
