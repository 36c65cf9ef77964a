"""The recipe of docs/howto/http-within.md in FastAPI; see within_apps.py."""

from __future__ import annotations

from typing import Annotated, Any

from fastapi import FastAPI, Header, Request, Response
from sqlalchemy import text
from sqlalchemy.ext.asyncio import AsyncSession, create_async_engine

from semel import AsyncSemel
from semel.http.fastapi import install
from tests.http.within_apps import INSERT, IS_SQLITE, REST, URL, die_once, key_of


def fastapi() -> Any:
    engine = create_async_engine(
        f"sqlite+aiosqlite://{REST}" if IS_SQLITE else f"postgresql+asyncpg://{REST}"
    )
    once = AsyncSemel(URL if IS_SQLITE else f"postgresql+asyncpg://{REST}")
    app = FastAPI()
    install(app)

    async def insert(session: AsyncSession, item: str) -> dict[str, str]:
        await session.execute(text(INSERT.format(":item")), {"item": item})
        return {"item": item}

    @app.post("/orders", status_code=201)
    async def create(
        request: Request,
        response: Response,
        item: Annotated[str, Header()],
        x_user: Annotated[str, Header()],
        x_die: Annotated[str | None, Header()] = None,
    ) -> dict[str, str]:
        key = key_of(request.headers.getlist("idempotency-key"), x_user)
        async with AsyncSession(engine) as session:
            outcome = await once.within(session).execute(key, insert, session, item, request=item, wait=5)
            die_once(x_die, "before commit")
            await session.commit()
        die_once(x_die, "after commit")
        response.headers["Idempotency-Replayed"] = str(outcome.replayed).lower()
        return outcome.value

    return app
