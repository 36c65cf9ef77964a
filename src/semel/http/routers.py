"""What a framework's router answers by itself: nothing of the application has run, and the key is free (H13).

Told only where it is certain. Whatever else it may be counts as the handler's own word (H14): a key that is freed after an
effect lets it happen twice, and one that is used up by a wrong address does no harm.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
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
    return status in _OWN and getattr(request, "routing_exception", None) is not None


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
