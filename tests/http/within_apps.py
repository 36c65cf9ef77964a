"""The recipe of docs/howto/http-within.md as applications of real servers, with moments to be killed at.

SEMEL_URL is the database of the rows and the records; SEMEL_FOLDER has the marks of those who died.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from semel import InvalidKey, Semel
from semel.http.problem import Problem
from semel.http.rules import core_key, read_key

FOLDER = Path(os.environ.get("SEMEL_FOLDER", "."))
URL = os.environ.get("SEMEL_URL", "sqlite:///shop.db")
INSERT = "INSERT INTO orders (item) VALUES ({})"
REST = URL.partition("://")[2]
IS_SQLITE = URL.startswith("sqlite")


def key_of(lines: Sequence[str], user: str) -> str:
    key = read_key([line.encode("latin-1") for line in lines])
    if isinstance(key, Problem):
        raise InvalidKey(str(key.extra.get("reason", key.kind.detail)))
    return core_key(key, user)


def die_once(asked: str | None, moment: str) -> None:
    if asked == moment and not (mark := FOLDER / f"died-{moment}").exists():
        mark.touch()
        os.kill(os.getpid(), signal.SIGKILL)


def flask() -> Any:
    from flask import Flask, request
    from sqlalchemy import create_engine, text
    from sqlalchemy.orm import Session

    from semel.http.flask import install

    url = URL if IS_SQLITE else f"postgresql+psycopg://{REST}"
    engine = create_engine(url)
    once = Semel(url)
    app = Flask("shop")
    install(app)

    def insert(session: Session, item: str) -> dict[str, str]:
        session.execute(text(INSERT.format(":item")), {"item": item})
        return {"item": item}

    @app.post("/orders")
    def create() -> Any:
        item, die = request.headers["item"], request.headers.get("x-die")
        key = key_of(request.headers.getlist("idempotency-key"), request.headers["x-user"])
        with Session(engine) as session:
            outcome = once.within(session).execute(key, insert, session, item, request=item, wait=5)
            die_once(die, "before commit")
            session.commit()
        die_once(die, "after commit")
        return outcome.value, 201, {"Idempotency-Replayed": str(outcome.replayed).lower()}

    return app


def django() -> Any:
    import types

    import django
    from django.conf import settings
    from django.db import connection, transaction
    from django.http import JsonResponse
    from django.urls import path

    once = Semel(URL if IS_SQLITE else f"postgresql+psycopg://{REST}")
    parts = urlsplit(URL)
    database: dict[str, Any] = {"ENGINE": "django.db.backends.sqlite3", "NAME": REST[1:]}
    if not IS_SQLITE:
        place = {"NAME": parts.path[1:], "HOST": parts.hostname, "PORT": parts.port, "USER": parts.username}
        database = {"ENGINE": "django.db.backends.postgresql", **place}

    def insert(item: str) -> dict[str, str]:
        with connection.cursor() as cursor:
            cursor.execute(INSERT.format("%s"), [item])
        return {"item": item}

    def create(request: Any) -> Any:
        item, die = request.headers["item"], request.headers.get("x-die")
        key = key_of([request.headers["Idempotency-Key"]], request.headers["x-user"])
        with transaction.atomic():
            outcome = once.within(connection).execute(key, insert, item, request=item, wait=5)
            die_once(die, "before commit")
        die_once(die, "after commit")
        headers = {"Idempotency-Replayed": str(outcome.replayed).lower()}
        return JsonResponse(outcome.value, status=201, headers=headers)

    urls = types.ModuleType("urls")
    urls.urlpatterns = [path("orders", create)]  # type: ignore[attr-defined]  # a module made here
    settings.configure(
        ROOT_URLCONF=urls,
        ALLOWED_HOSTS=["*"],
        DATABASES={"default": database},
        MIDDLEWARE=["semel.http.django.ProblemMiddleware"],
    )
    django.setup()
    from django.core.wsgi import get_wsgi_application

    return get_wsgi_application()
