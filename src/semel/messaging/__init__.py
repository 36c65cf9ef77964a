"""Messages that commit with your rows, travel once, and are admitted once."""

from __future__ import annotations

from semel.errors import ConfigurationError

try:
    import sqlalchemy  # noqa: F401 - missing, it is told at once, whichever module would need it first
except ModuleNotFoundError as missing:  # pragma: no cover - needs an environment without it
    raise ConfigurationError(
        'messaging needs SQLAlchemy: pip install "semel[messaging]" brings it'
    ) from missing

# what admits them
from semel.messaging.inbox import Inbox
from semel.messaging.letters import DeadLetter

# what is sent
from semel.messaging.message import Message

# in the caller's transaction
from semel.messaging.outbox import Outbox

# what carries them
from semel.messaging.relay import Relay, Report
from semel.messaging.routes import Route

# what a sink is, and what may come late
from semel.messaging.sink import Fenced, Guarantee, Rejected, Row, Sink, SinkUnavailable
from semel.messaging.windows import Windows

__all__ = [
    "DeadLetter",
    "Fenced",
    "Guarantee",
    "Inbox",
    "Message",
    "Outbox",
    "Rejected",
    "Relay",
    "Report",
    "Route",
    "Row",
    "Sink",
    "SinkUnavailable",
    "Windows",
]
