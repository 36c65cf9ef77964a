"""What a framework's router answers by itself: nothing of the application has run, and the key is free (H13).

Told only where it is certain. Whatever else it may be counts as the handler's own word (H14): a key that is freed after an
effect lets it happen twice, and one that is used up by a wrong address does no harm.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping
from typing import Any, Final

__all__ = ["asgi_unrouted", "wsgi_unrouted"]

_OWN: Final = frozenset({307, 308, 404, 405})  # another spelling of the path, no such path, another method


def asgi_unrouted(scope: Mapping[str, Any], status: int) -> bool:
    """By what Starlette, FastAPI and Litestar leave in the scope when they have found a route."""
    if status not in _OWN:
        return False
    if "router" in scope:
        return _by_starlette(scope, status)
    return "litestar_app" in scope and "route_handler" not in scope


def wsgi_unrouted(environ: Mapping[str, Any], status: int) -> bool:
    """By what Flask remembers of its search for a route."""
    request = environ.get("werkzeug.request")
    error = getattr(request, "routing_exception", None)
    flask = sys.modules.get("flask")
    if status not in _OWN or error is None or flask is None or not flask.has_request_context():
        return False
    if flask.request._get_current_object() is not request:  # noqa: SLF001 - another application answers
        return False
    app = flask.current_app._get_current_object()  # noqa: SLF001 - itself
    return type(app) is flask.Flask and not _runs_without_a_route(app, status, type(error))


def _runs_without_a_route(app: Any, status: int, error: type) -> bool:
    """Whether Flask calls functions of the application also where it finds no route. Ours do nothing."""
    around = (app.before_request_funcs, app.url_value_preprocessors, app.after_request_funcs)
    if any(not _is_ours(one) for called in around for some in called.values() for one in some):
        return True
    return any(
        handlers and (code == status or (code is None and _handles(handlers, error)))
        for codes in app.error_handler_spec.values()
        for code, handlers in codes.items()
    )


def _is_ours(called: Any) -> bool:
    return getattr(called, "__module__", None) == "semel.http.flask"


def _handles(kinds: Iterable[type], error: type) -> bool:
    return any(issubclass(error, kind) for kind in kinds)


def _by_starlette(scope: Mapping[str, Any], status: int) -> bool:
    route, endpoint = scope.get("route"), scope.get("endpoint")
    if route is None and endpoint is None:
        return _is_plain(scope["router"])
    if status == 405 and endpoint is getattr(route, "endpoint", None):  # the path is known, the method is not
        methods = (
            getattr(route, "methods", None) or ()
        )  # none are named: the endpoint knows them, and was asked
        return bool(methods) and scope["method"] not in methods
    # Inside of a Mount the endpoint is the mounted router, until that one has found a route of its own.
    return (route is None or getattr(route, "app", None) is endpoint) and _is_plain(endpoint)


def _is_plain(router: Any) -> bool:
    """Starlette's own router, which answers by itself: no `default=` does, and no middleware shows it another scope than ours."""
    routing, applications = sys.modules.get("starlette.routing"), sys.modules.get("starlette.applications")
    if applications is not None and isinstance(router, applications.Starlette):
        if router.user_middleware:
            return False
        router = router.router
    return (
        routing is not None
        and isinstance(router, routing.Router)
        and router.default == router.not_found
        and getattr(router, "middleware_stack", router.app) == router.app
    )
