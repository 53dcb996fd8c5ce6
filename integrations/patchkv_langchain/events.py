"""Edits and recovery reports as LangChain's custom events, and in traces.

Handlers get `on_custom_event("patchkv_edit", {...})` for each edit and
`on_custom_event("patchkv_recovery", {...})` for each resume; `astream_events` has them too. Traces
have the edits where the nodes' are (`patchkv_langgraph.events`). No content is in them.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from langchain_core.callbacks import adispatch_custom_event, dispatch_custom_event

from patchkv_agents.records import report_record
from patchkv_langgraph.events import adispatch_edits, dispatch_edits, edit_data, trace_edits

if TYPE_CHECKING:
    from patchkv_agents.context import Edit
    from patchkv_agents.recovery.report import RecoveryReport

RECOVERY_EVENT = "patchkv_recovery"
_KEY = "messages"  # what of a graph's state was edited


def dispatch_reply(report: RecoveryReport | None, edits: Iterable[Edit], version_id: str) -> None:
    """Send the edits and the report of a call to the handlers of the active run, if there is one.

    Args:
        report: of the resume; None if the model does not recover.
        edits: those that made the version.
        version_id: the version that was answered.
    """
    data = edit_data(edits, version_id, _KEY)
    trace_edits(data)
    dispatch_edits(data, None)
    if report is not None:
        try:
            dispatch_custom_event(RECOVERY_EVENT, {"version": version_id, **report_record(report)})
        except RuntimeError:  # no run is active
            return


async def adispatch_reply(
    report: RecoveryReport | None, edits: Iterable[Edit], version_id: str
) -> None:
    """As `dispatch_reply`, for asynchronous runs."""
    data = edit_data(edits, version_id, _KEY)
    trace_edits(data)
    await adispatch_edits(data, None)
    if report is not None:
        try:
            await adispatch_custom_event(
                RECOVERY_EVENT, {"version": version_id, **report_record(report)}
            )
        except RuntimeError:  # no run is active
            return
