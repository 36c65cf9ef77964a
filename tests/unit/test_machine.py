"""Where servers are told to live, and how few certificate authorities they need."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

import pytest

from semel.testing.services.machine import FOLDER, few_authorities, on_disk, under

_END = "-----END CERTIFICATE-----"


@pytest.mark.parametrize("before", [None, "/before"])
def test_a_place_for_servers_is_named_for_a_while(
    monkeypatch: pytest.MonkeyPatch, before: str | None
) -> None:
    monkeypatch.delenv(FOLDER, raising=False)
    if before is not None:
        monkeypatch.setenv(FOLDER, before)
    with under("/memory"):
        assert os.environ[FOLDER] == "/memory"
        with on_disk():
            assert os.environ[FOLDER] == tempfile.gettempdir()
        assert os.environ[FOLDER] == "/memory"
    assert os.environ.get(FOLDER) == before


def test_one_authority_is_kept_of_many(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    many = tmp_path / "many.pem"
    many.write_text(f"first\n{_END}\nsecond\n{_END}\n", "utf-8")
    monkeypatch.setenv("SSL_CERT_FILE", str(many))
    kept = few_authorities(tmp_path)
    assert Path(kept["SSL_CERT_FILE"]).read_text("utf-8") == f"first\n{_END}\n"
    many.write_text("", "utf-8")
    assert few_authorities(tmp_path) == {}
