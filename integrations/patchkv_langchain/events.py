"""Edits and recovery reports as LangChain's custom events.

Handlers get `on_custom_event("patchkv_edit", {...})` for each edit and
`on_custom_event("patchkv_recovery", {...})` for each resume; `astream_events` has them too. No
content is in them.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from langchain_core.callbacks import adispatch_custom_event, dispatch_custom_event

from patchkv_agents.records import edit_record, report_record

if TYPE_CHECKING:
    from patchkv_agents.context import Edit
    from patchkv_agents.recovery.report import RecoveryReport

EDIT_EVENT = "patchkv_edit"
RECOVERY_EVENT = "patchkv_recovery"

Event = tuple[str, dict[str, Any]]


def dispatch_reply(report: RecoveryReport | None, edits: Iterable[Edit], version_id: str) -> None:
    """Tell the handlers of the run that is active, if one is.

    Args:
        report: of the resume; None if the model does not recover.
        edits: those that made the version.
        version_id: the version that was answered.
    """
    try:
        for name, data in _events(report, edits, version_id):
            dispatch_custom_event(name, data)
    except RuntimeError:  # no run is active
        return


async def adispatch_reply(
    report: RecoveryReport | None, edits: Iterable[Edit], version_id: str
) -> None:
    """As `dispatch_reply`, for asynchronous runs."""
    try:
        for name, data in _events(report, edits, version_id):
            await adispatch_custom_event(name, data)
    except RuntimeError:  # no run is active
        return


def _events(
    report: RecoveryReport | None, edits: Iterable[Edit], version_id: str
) -> Iterable[Event]:
    for edit in edits:
        yield EDIT_EVENT, {"version": version_id, **edit_record(edit)}
    if report is not None:
        yield RECOVERY_EVENT, {"version": version_id, **report_record(report)}
