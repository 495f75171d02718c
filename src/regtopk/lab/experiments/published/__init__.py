"""The paper's own points, read off its figures."""

import json
from importlib.resources import files
from typing import Any


def published_figure(number: int) -> dict[str, Any]:
    """The points of a figure, curve by curve, with their source."""
    path = files(__name__) / f"figure{number}.json"
    return dict(json.loads(path.read_text(encoding="utf-8")))
