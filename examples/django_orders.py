"""A Django view that is safe to retry, with everything in one file: a repeated payment is answered from its record."""

from __future__ import annotations

import tempfile
from typing import Any

import django
from django.conf import settings
from django.http import HttpRequest, JsonResponse
from django.test import Client
from django.urls import path

from semel import Semel
from semel.http.django import idempotent

TOKENS = {"token-of-ann": "ann"}
once = Semel("memory://")  # a real service gives its database's URL
payments: list[str] = []


def payer(request: HttpRequest) -> str | None:
    return TOKENS.get(request.headers.get("Authorization", "").removeprefix("Bearer "))


@idempotent(once=once, principal=payer, effects="opaque", required=True)
def pay(request: HttpRequest) -> JsonResponse:
    payments.append(str(payer(request)))
    return JsonResponse({"receipt": len(payments)}, status=201)


urlpatterns = [path("pay", pay)]


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        settings.configure(ROOT_URLCONF=__name__, ALLOWED_HOSTS=["*"], SECRET_KEY="example", BASE_DIR=folder)
        django.setup()
        client = Client()

        def send(**headers: str) -> Any:
            given = {"Authorization": "Bearer token-of-ann", **headers}
            return client.post("/pay", {"amount": 5}, content_type="application/json", headers=given)

        for _ in range(3):
            answer = send(**{"Idempotency-Key": "payment-1"})
            print(answer.status_code, answer.json(), "replayed:", answer.headers["Idempotency-Replayed"])
        print("without a key:", send().status_code)
        once.close()
    print(f"4 requests, {len(payments)} payment made")


if __name__ == "__main__":
    main()
