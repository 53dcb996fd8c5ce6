"""A context under version control: edits, a branch, blame, and a secret that is forgotten.

Needs no model. Run it as `python examples/versions.py agent.db`, then look at the same file with
`patchkv log agent.db support` and `patchkv explain agent.db support`.
"""

import sys
from pathlib import Path

from patchkv_agents import ContextHistory
from patchkv_agents.context import SQLiteHistoryStore

path = Path(sys.argv[1] if len(sys.argv) > 1 else "agent.db")
if path.exists():
    sys.exit(f"{path} exists: name a file that does not")

with SQLiteHistoryStore(path) as store:
    history = ContextHistory(store, thread="support")
    call = {"id": "call_1", "name": "find_order", "args": {"email": "mara@example.org"}}
    history.commit(
        [
            {"role": "system", "content": "You are the support agent of a bicycle shop."},
            {"role": "user", "content": "Where is my order? My pin is 7316-22."},
            {"role": "assistant", "content": "", "tool_calls": [call]},
            {"role": "tool", "tool_call_id": "call_1", "content": "status: packed"},
        ]
    )

    # The tool is asked again, and its newer result takes the place of the old one.
    history.replace("call_1", "status: on its way", author="find_order")

    # What if the order were lost? A branch, and back to where the thread really is.
    history.branch("what-if")
    history.checkout("what-if")
    history.replace("call_1", "status: lost", author="what-if")
    history.checkout("main")

    for form in history.blame("call_1"):
        print(f"the result was {form.message.text!r} since version {form.version_id}")

    # The pin goes: from the present context, from every version, and from the file.
    version = history.redact(1, "Where is my order? [pin removed]", secrets=["7316-22"])
    print("removed from", len(version.forgotten.versions), "versions;", version.forgotten.status)

    for version in history.log():
        for edit in version.edits:
            print(version.id, edit.kind, "by", edit.author or "somebody")

print("the pin is in the file:", b"7316-22" in path.read_bytes())
