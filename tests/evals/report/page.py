"""Reads a report page back: its tables, by section, and its images."""

from __future__ import annotations

from dataclasses import dataclass, field
from html.parser import HTMLParser


@dataclass
class Table:
    section: str
    caption: str
    rows: list[list[str]] = field(default_factory=list)


class Page(HTMLParser):
    """Tables (headers are the first row), images, links and all text of a page."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.tables: list[Table] = []
        self.images: list[dict[str, str | None]] = []
        self.addresses: list[str] = []
        self.text = ""
        self._sections: list[str] = []
        self._in_cell = False
        self.feed(html)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        attributes = dict(attrs)
        self.addresses += [v for k, v in attrs if k in ("href", "src", "srcset", "style") and v]
        if tag == "section":
            self._sections.append(attributes["id"] or "")
        elif tag == "table":
            self.tables.append(
                Table(
                    self._sections[-1] if self._sections else "", attributes.get("aria-label") or ""
                )
            )
        elif tag == "tr":
            self.tables[-1].rows.append([])
        elif tag in ("td", "th"):
            self.tables[-1].rows[-1].append("")
            self._in_cell = True
        elif tag == "img":
            self.images.append(attributes)

    def handle_endtag(self, tag: str) -> None:
        if tag == "section":
            self._sections.pop()
        self._in_cell = self._in_cell and tag not in ("td", "th")

    def handle_data(self, data: str) -> None:
        plain = data.replace("\N{NO-BREAK SPACE}", " ")
        self.text += plain
        if self._in_cell:
            self.tables[-1].rows[-1][-1] += plain

    def in_section(self, section: str) -> list[Table]:
        return [table for table in self.tables if table.section == section]
