"""The shared edits, given nothing but the two versions: which messages changed, and how."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from patchkv_agents.context import Conversation, infer_edits, parse_messages, parse_tools
from patchkv_agents.context.edits import EditKind, may_be

CASES = "01 03 04 06 08 09 10 12 14 15 18 20 21 22 25 26 30 31 32".split()
# What was intended cannot be seen in these; in all others the kind is exactly the one declared.
ONLY_CLASS = {"08", "21", "26", "30"}


@pytest.mark.parametrize("case", CASES)
def test_shared_cases(shared_dir: Path, case: str) -> None:
    """Affected messages and the kinds of their changes are found in all cases."""
    (path,) = (shared_dir / "edits").glob(f"{case}-*.json")
    document = json.loads(path.read_text("utf-8"))
    versions = [document["old"], document["new"], *filter(None, [document.get("next")])]
    for step, (old, new) in enumerate(zip(versions, versions[1:], strict=False)):
        suffix = "_next" if step else ""
        before = Conversation(parse_messages(old), parse_tools(document["tools"]))
        tools = document.get("tools_new", document["tools"])
        after = Conversation(parse_messages(new), parse_tools(tools))
        edits = infer_edits(before, after)
        expected = document["edits" + suffix]
        kept = document["unchanged" + suffix]
        assert {i for e in edits for i in e.old_indices} == set(range(len(old))) - {
            i for i, _ in kept
        }
        assert {j for e in edits for j in e.new_indices} == set(range(len(new))) - {
            j for _, j in kept
        }
        assert len(edits) == len(expected)
        for said in expected:
            places = said["message_index_old"], said["message_index_new"]
            (found,) = (e for e in edits if (e.old_index, e.new_index) == places)
            kind = EditKind(said["kind"])
            assert kind in (may_be(found.kind) if case in ONLY_CLASS else {found.kind}), said
            if "span_old" in said:
                first, last = said["span_old"]
                assert found.old_indices == tuple(range(first, last + 1))
