"""A message consumer: the broker delivers at least once, `consume` handles each message once and keeps no result."""

from __future__ import annotations

import tempfile
from pathlib import Path

from semel import InProgress, Semel, StoreUnavailable

DELIVERIES = ["m-1", "m-2", "m-1", "m-3", "m-2", "m-2"]  # as a broker does it after lost acknowledgements


def handle(message: str) -> None:
    print("handling", message)


def main() -> None:
    handled = skipped = 0
    folder = tempfile.TemporaryDirectory()
    with folder, Semel(f"sqlite:///{Path(folder.name) / 'semel.db'}", operation="orders.consumer") as once:
        for message in DELIVERIES:
            try:
                if once.consume(message, handle, message, retention=7 * 86_400):
                    handled += 1
                else:
                    skipped += 1
            except (InProgress, StoreUnavailable) as error:
                print("not acknowledged, the broker will send it again:", error)
                continue
            # Here the message is acknowledged: it was handled now, or had been.
    print(f"{handled} messages handled, {skipped} redeliveries skipped")


if __name__ == "__main__":
    main()
