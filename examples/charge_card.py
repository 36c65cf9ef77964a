"""Charge a card once: the bank is outside, so it gets a key that is the same on every attempt (row `keyed`)."""

from __future__ import annotations

import tempfile
from pathlib import Path

from semel import Semel, current_run


class Bank:
    """Stands for a payment service that takes an idempotency key."""

    def __init__(self) -> None:
        self.books: dict[str, int] = {}
        self.calls = 0

    def charge(self, cents: int, *, idempotency_key: str) -> str:
        self.calls += 1
        self.books.setdefault(idempotency_key, cents)
        if self.calls == 1:
            raise ConnectionError("the line went dead after the bank had booked")
        return f"charged {cents} cents"


bank = Bank()


def charge(cents: int) -> str:
    return bank.charge(cents, idempotency_key=current_run().downstream_key("bank"))


def main() -> None:
    folder = tempfile.TemporaryDirectory()
    with folder, Semel(f"sqlite:///{Path(folder.name) / 'semel.db'}", operation="charge") as once:
        for number in range(1, 4):
            try:
                outcome = once.execute("order-7", charge, 500, request={"cents": 500})
            except ConnectionError as error:
                print(f"call {number}: {error}")
            else:
                print(f"call {number}: {outcome.value}, replayed={outcome.replayed}")
    print(f"{bank.calls} calls to the bank, {len(bank.books)} charge on the bank's books")


if __name__ == "__main__":
    main()
