"""What keyed routes promise, written into an OpenAPI document (H42). Pure."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Final

from semel.http.problem import PROBLEMS
from semel.http.rules import MARKER, RETENTION, Rules

__all__ = ["describe"]

_SCHEMA: Final = "IdempotencyProblem"
_STATUSES: Final = (400, 409, 422, 503)


def describe(document: dict[str, Any], routes: Iterable[tuple[str, Iterable[str], Rules]]) -> None:
    """Add the key's header, the problems, the markers and `x-idempotency` to the operations of these routes."""
    found = False
    for path, methods, rules in routes:
        item = document.get("paths", {}).get(path, {})
        for method in methods:
            operation = item.get(method.lower())
            if operation is not None and method.upper() in rules.methods:
                found = True
                _operation(operation, rules)
    if found:
        schemas = document.setdefault("components", {}).setdefault("schemas", {})
        schemas.setdefault(_SCHEMA, _problem_schema())


def _operation(operation: dict[str, Any], rules: Rules) -> None:
    parameters = operation.setdefault("parameters", [])
    for source in rules.sources:
        kind, _, name = source.partition(":")
        if kind in ("header", "query"):
            shown = "-".join(part.capitalize() for part in name.split("-")) if kind == "header" else name
            parameters.append(_parameter(kind, shown, rules))
    responses = operation.setdefault("responses", {})
    for status in _STATUSES:
        _add_problem(responses.setdefault(str(status), {"description": ""}), status)
    for status, response in responses.items():
        if status.startswith("2"):
            response.setdefault("headers", {}).update(_markers(rules))
    operation["x-idempotency"] = {
        "ttl": None if rules.retention == float("inf") else int(rules.retention),
        "in_flight_max": rules.max_waiters,
        "required": rules.required,
        "scope": rules.scope,
    }


def _parameter(kind: str, name: str, rules: Rules) -> dict[str, Any]:
    return {
        "name": name,
        "in": kind,
        "required": rules.required and len(rules.sources) == 1,
        "description": "Names this action. Repeat the request with the same key to get the first one's response.",
        "schema": {
            "type": "string",
            "minLength": rules.min_length,
            "maxLength": 255,
            "pattern": '^(?:[!#-+\\--:<-\\[\\]-~]+|"(?:[!#-\\[\\]-~]|\\\\["\\\\])+")$',
        },
    }


def _add_problem(response: dict[str, Any], status: int) -> None:
    names = [kind.name for kind in PROBLEMS.values() if kind.status == status]
    note = f"Idempotency: {', '.join(names)}"
    response["description"] = "; ".join(filter(None, (response.get("description"), note)))
    schema = {"$ref": f"#/components/schemas/{_SCHEMA}"}
    response.setdefault("content", {})["application/problem+json"] = {"schema": schema}
    if status in (409, 503):
        response.setdefault("headers", {})["Retry-After"] = {"schema": {"type": "integer", "minimum": 1}}


def _markers(rules: Rules) -> dict[str, Any]:
    shown = rules.markers or (MARKER,)
    headers: dict[str, Any] = {
        "-".join(part.capitalize() for part in marker.split("-")): {
            "description": "Whether this is the response of an earlier request; absent: the key was not honoured.",
            "schema": {"type": "string", "enum": ["true", "false"]},
        }
        for marker in shown
    }
    headers["-".join(part.capitalize() for part in RETENTION.split("-"))] = {
        "description": "Seconds for which the response can be had again.",
        "schema": {"type": "integer"},
    }
    return headers


def _problem_schema() -> dict[str, Any]:
    return {
        "type": "object",
        "required": ["type", "title", "status", "retryable"],
        "properties": {
            "type": {"type": "string", "format": "uri"},
            "title": {"type": "string"},
            "status": {"type": "integer"},
            "detail": {"type": "string"},
            "retryable": {"type": "boolean"},
            "retry_after": {"type": "integer"},
        },
    }
