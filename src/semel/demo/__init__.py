"""`python -m semel.demo`: callers in several processes race for the same keys over one SQLite file, one is killed.

program.py   the command: options, start, end, exit code
race.py      starts the workers, kills one in the middle of the function, keeps count
worker.py    one process: several callers, each of which calls every key
ledger.py    where effects go: a file outside of semel, one line per effect
view.py      what is shown meanwhile, live or in plain lines
summary.py   what happened, and what it shows and does not show
"""

from __future__ import annotations
