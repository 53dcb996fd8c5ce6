"""The HTML page: one file that needs nothing else, in which all text is escaped."""

from __future__ import annotations

import base64
from collections.abc import Iterator, Sequence
from importlib.resources import files

from patchkv_evals.report.blocks import Block, Picture, Section


def render(title: str, head: Sequence[Block], sections: Sequence[Section]) -> str:
    """The page as HTML; figures are in it."""
    from jinja2 import Environment, StrictUndefined

    environment = Environment(
        autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    environment.filters["base64"] = lambda content: base64.b64encode(content).decode()
    environment.filters["kind"] = lambda block: type(block).__name__
    template = environment.from_string(
        (files("patchkv_evals.report") / "page.html").read_text(encoding="utf-8")
    )
    return template.render(title=title, head=head, sections=sections) + "\n"


def pictures(sections: Sequence[Section]) -> Iterator[Picture]:
    """All figures, in order."""
    for section in sections:
        yield from (block for block in section.blocks if isinstance(block, Picture))
        yield from pictures(section.sections)
