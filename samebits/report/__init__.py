"""A self-contained report of one evidence file: HTML with inlined plots, no external address."""

from __future__ import annotations

from collections.abc import Mapping
from importlib import resources
from typing import Any


def render(page: Mapping[str, Any]) -> str:
    """HTML of a report. Keys of `page` are the names that `report.html.j2` uses."""
    import jinja2

    template = resources.files(__package__).joinpath("report.html.j2").read_text()
    environment = jinja2.Environment(autoescape=True, undefined=jinja2.StrictUndefined)
    return environment.from_string(template).render(**page)
