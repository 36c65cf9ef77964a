"""The outcome of a payment is lost. A probe asks the bank before anything is tried again; where it cannot tell, a person does."""

from __future__ import annotations

import tempfile
from pathlib import Path

from semel import NOT_FOUND, UNDECIDED, Found, OutcomeUnknown, Semel, current_run


class Bank:
    """Stands for a service that books, and then may not answer."""

    def __init__(self) -> None:
        self.booked: dict[str, int] = {}
        self.answers = False


bank = Bank()


def pay(cents: int) -> str:
    bank.booked[current_run().key] = cents
    raise TimeoutError("the bank did not answer; did it book?")


def look_up(cents: int) -> object:
    """What the bank knows of this payment: an authoritative answer, or none."""
    if not bank.answers:
        return UNDECIDED
    key = current_run().key
    return Found(f"{cents} cents paid") if bank.booked.get(key) == cents else NOT_FOUND


def attempt(once: Semel, key: str) -> None:
    try:
        print(f"{key}: {once.execute(key, pay, 500, on_unknown=look_up).value}")
    except (TimeoutError, OutcomeUnknown) as error:
        print(f"{key}: {type(error).__name__}: {error}")


def main() -> None:
    folder = tempfile.TemporaryDirectory()
    with folder, Semel(f"sqlite:///{Path(folder.name) / 'semel.db'}", operation="pay") as once:
        attempt(once, "order-7")
        attempt(once, "order-7")  # the bank is still away: it stays unknown, and nothing is run again
        bank.answers = True
        attempt(once, "order-7")

        bank.answers = False
        attempt(once, "order-8")
        once.resolve("order-8", value="500 cents paid", actor="ann", reason="seen on the bank statement")
        attempt(once, "order-8")
        (event,) = once.history("order-8")
        print(
            f"order-8 was resolved by {event.actor}: {event.reason}; {len(bank.booked)} payments booked in all"
        )


if __name__ == "__main__":
    main()
