"""Edits as LangChain's custom events, and in traces.

Handlers get `on_custom_event("patchkv_edit", {...})` for each edit, and `astream_events` has it
too. LangSmith shows the edits among the metadata of the node's run, OpenTelemetry as events of the
span that is active. No content is in them.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable
from typing import Any

from langchain_core.callbacks import adispatch_custom_event, dispatch_custom_event
from langchain_core.runnables import RunnableConfig

from patchkv_agents.context import Edit
from patchkv_agents.records import edit_record

EDIT_EVENT = "patchkv_edit"

EditData = dict[str, Any]


def edit_data(edits: Iterable[Edit], version_id: str, key: str) -> list[EditData]:
    """What events say of the edits of a version."""
    return [{"version": version_id, "key": key, **edit_record(edit)} for edit in edits]


def dispatch_edits(data: Iterable[EditData], config: RunnableConfig | None) -> None:
    """Send an event for each edit to the handlers of a run, if there is one."""
    for each in data:
        try:
            dispatch_custom_event(EDIT_EVENT, each, config=config)
        except RuntimeError:  # no run is active
            return


async def adispatch_edits(data: Iterable[EditData], config: RunnableConfig | None) -> None:
    """As `dispatch_edits`, for asynchronous runs."""
    for each in data:
        try:
            await adispatch_custom_event(EDIT_EVENT, each, config=config)
        except RuntimeError:  # no run is active
            return


def trace_edits(data: list[EditData]) -> None:
    """Add edits to the traces of the active run, as far as anybody traces it."""
    if not data:
        return
    if "langsmith" in sys.modules:
        from langsmith.run_helpers import get_current_run_tree

        run = get_current_run_tree()
        if run is not None:
            shown = [*run.metadata.get("patchkv_edits", ()), *data]
            run.add_metadata({"patchkv_edits": shown})
    if "opentelemetry" in sys.modules:
        from opentelemetry.trace import get_current_span

        for each in data:
            values = {name: value for name, value in each.items() if value is not None}
            get_current_span().add_event(EDIT_EVENT, values)
