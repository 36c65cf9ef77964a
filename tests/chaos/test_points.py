"""No place in the product is reached under a name that nobody breaks: `test_cells` holds each listed one against the matrix."""

from __future__ import annotations

import re
from pathlib import Path

import semel
from semel import points

HOME = Path(semel.__file__).parent


def test_every_point_that_the_product_reaches_is_listed_and_the_other_way_round() -> None:
    files = [path for path in HOME.rglob("*.py") if path.relative_to(HOME).parts[0] != "testing"]
    texts = [path.read_text("utf-8") for path in files if path.name != "points.py"]
    assert {name for text in texts for name in re.findall(r"\breach\(\"([^\"]+)\"\)", text)} == set(
        points.POINTS
    )
    assert not [text for text in texts if re.search(r"\breach\((?!\")", text)], (
        "a name that is not written out"
    )
