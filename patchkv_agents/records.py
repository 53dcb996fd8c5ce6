"""Edits and recovery reports as JSON values, without hashes and content."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from patchkv_agents.context import Edit
    from patchkv_agents.recovery.report import RecoveryReport


def edit_record(edit: Edit) -> dict[str, Any]:
    """An edit without hashes and content."""
    return {
        "id": edit.id,
        "kind": str(edit.kind),
        "author": edit.author,
        "old_indices": list(edit.old_indices),
        "new_indices": list(edit.new_indices),
        "scope": edit.scope,
        "where": edit.where,
        "declared": edit.declared,
        "partial": edit.partial,
        "forget": edit.forget,
    }


def report_record(report: RecoveryReport) -> dict[str, Any]:
    """A report as JSON values."""
    record = asdict(report)
    formats: Mapping[str, int] = report.restored_formats
    return {**record, "restored_formats": dict(formats)}
