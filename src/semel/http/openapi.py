"""What keyed routes promise, written into an OpenAPI document (H42). Pure."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Final

from semel.http.ending import keeps_failures
from semel.http.problem import FAILED, PROBLEMS
from semel.http.rules import RETENTION, Rules, titled

__all__ = ["describe"]

_SCHEMA: Final = "IdempotencyProblem"
# The layer's own classes (R2 of the specification); the others come from whoever stands in front, or are rare.
_STATUSES: Final = frozenset({400, 409, 422, 503})


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
            _add_parameter(parameters, _parameter(kind, titled(name) if kind == "header" else name, rules))
    if rules.repeatability:
        parameters.append(_first_sent())
    responses = operation.setdefault("responses", {})
    for status, names in _problems(rules).items():
        _add_problem(responses.setdefault(str(status), {"description": ""}), status, names, rules)
    for status, response in responses.items():
        if status.startswith("2"):
            response.setdefault("headers", {}).update(_markers(rules))
    operation["x-idempotency"] = {
        "ttl": None if rules.retention == float("inf") else int(rules.retention),
        "in_flight_max": rules.max_waiters,  # requests, not seconds: a handler may run for as long as it likes
        "required": rules.required,
        "scope": rules.scope,
    }


def _add_parameter(parameters: list[dict[str, Any]], added: dict[str, Any]) -> None:
    """One that the function declares too is told once: what it says of it stays, and what a key looks like comes from here."""

    def name_of(one: dict[str, Any]) -> tuple[str, str]:
        kind, name = one.get("in", ""), one.get("name", "")
        return kind, name.lower() if kind == "header" else name

    known = next((one for one in parameters if name_of(one) == name_of(added)), None)
    if known is None:
        parameters.append(added)
    else:
        required = bool(known.get("required")) or added["required"]
        known.update({**added, **known, "schema": added["schema"], "required": required})


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


def _first_sent() -> dict[str, Any]:
    return {
        "name": "Repeatability-First-Sent",
        "in": "header",
        "required": False,  # it is, where there is an id
        "description": "When the request was sent for the first time, as an HTTP date. Goes with Repeatability-Request-ID.",
        "schema": {"type": "string"},
    }


def _problems(rules: Rules) -> dict[int, list[str]]:
    """The names of the layer's own answers, by the status that this route gives them."""
    found: dict[int, list[str]] = {}
    some = {"quota-exceeded": rules.quota is not None, FAILED: keeps_failures(rules)}
    for kind in PROBLEMS.values():
        if kind.status in _STATUSES or some.get(kind.name, False):
            found.setdefault(rules.statuses.get(kind.name, kind.status), []).append(kind.name)
    return dict(sorted(found.items()))


def _add_problem(response: dict[str, Any], status: int, names: list[str], rules: Rules) -> None:
    note = f"Idempotency: {', '.join(names)}"
    response["description"] = "; ".join(filter(None, (response.get("description"), note)))
    schema = {"$ref": f"#/components/schemas/{_SCHEMA}"}
    response.setdefault("content", {})["application/problem+json"] = {"schema": schema}
    if status in (409, 429, 503):
        response.setdefault("headers", {})["Retry-After"] = {"schema": {"type": "integer", "minimum": 1}}
    if rules.repeatability:
        response.setdefault("headers", {})["Repeatability-Result"] = _RESULT


def _markers(rules: Rules) -> dict[str, Any]:
    headers: dict[str, Any] = {
        titled(marker): {
            "description": "Whether this is the response of an earlier request; absent: the key was not honoured.",
            "schema": {"type": "string", "enum": ["true", "false"]},
        }
        for marker in rules.markers
    }
    if rules.repeatability:
        headers["Repeatability-Result"] = _RESULT
    headers[titled(RETENTION)] = {
        "description": "Seconds for which the response can be had again.",
        "schema": {"type": "integer"},
    }
    return headers


_RESULT: Final[dict[str, Any]] = {
    "description": "Whether the request was taken as a repeatable one; absent: it was not looked at as one.",
    "schema": {"type": "string", "enum": ["accepted", "rejected"]},
}


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
            "instance": {"type": "string", "format": "uri"},
        },
    }
