"""A plain loop with OpenAI-style messages: no agent framework, the same tracking and recovery.

The program keeps a list of dicts and edits it as it likes. It declares the edits whose meaning
cannot be seen; the others are found by comparing.

Run it with the embedded model: `python examples/openai_loop.py`, or name another one.
"""

from __future__ import annotations

import sys
from typing import Any

from patchkv_agents import Edit, EditKind, Engine, RecoveryPolicy

LINE = "Berth {0}: the barge {0} is being unloaded, and its crew waits for the crane in the rain. "


def harbour_log(hour: int) -> str:
    """The tool: it says something else each hour."""
    return f"At {hour} o'clock the tide is {'rising' if hour < 12 else 'falling'}."


def main() -> int:
    """Ask three times; the context is edited in between."""
    engine = Engine.from_pretrained(
        sys.argv[1] if len(sys.argv) > 1 else "smollm2",
        policy=RecoveryPolicy.default(),  # an approximation, chosen on purpose; without it: exact
    )
    thread = engine.thread("harbour")

    def call(call_id: str, name: str) -> dict[str, Any]:
        function = {"name": name, "arguments": "{}"}
        return {"id": call_id, "type": "function", "function": function}

    messages: list[dict[str, Any]] = [
        {"role": "system", "content": "You are the harbour master's assistant. Plan: wait."},
        {"role": "user", "content": "Look at the tide and at the berths."},
        {"role": "assistant", "content": None, "tool_calls": [call("tide", "harbour_log")]},
        {"role": "tool", "tool_call_id": "tide", "content": harbour_log(9)},
        {"role": "assistant", "content": None, "tool_calls": [call("berths", "berths")]},
        {
            "role": "tool",
            "tool_call_id": "berths",
            "content": "".join(LINE.format(number) for number in range(24)),
        },
        {"role": "user", "content": "Is the tide rising or falling? One word."},
    ]
    is_recovered = True
    for turn in range(3):
        edits: list[Edit] = []
        if turn == 1:  # the tool is asked again, and its newer result takes the old one's place
            messages[3]["content"] = harbour_log(15)
            edits = [
                Edit.declare(
                    EditKind.REFRESH_EVIDENCE, tool_call_ids=["tide"], author="harbour_log"
                )
            ]
        if turn == 2:  # the plan changes; that this is a plan cannot be seen
            messages[0]["content"] = messages[0]["content"].replace("wait", "leave at once")
            edits = [Edit.declare(EditKind.REVISE_PLAN, old=[0], new=[0], author="planner")]
        reply = thread.generate(messages, edits=edits, max_new_tokens=8)
        thread.suspend()  # as while a tool runs
        messages.append({"role": "assistant", "content": reply.text})
        messages.append({"role": "user", "content": f"And {turn + 1} hours later? One word."})
        report = reply.report
        print(
            f"turn {turn}: {report.tokens} tokens, {report.prefix} kept, {report.restored} "
            f"restored; first token after {report.resume_ttft_ms:.0f} ms"
        )
        if turn:
            is_recovered &= report.fallback_reason is None and report.restored > report.tokens / 2

    found = set()
    for version in reversed(thread.history.log()):
        for edit in version.edits:
            found.add((str(edit.kind), edit.author))
            print(f"  {edit.kind:<17} by {edit.author or 'the loop':<12} {edit.new_indices}")
    expected = {("refresh_evidence", "harbour_log"), ("revise_plan", "planner"), ("append", None)}
    return 0 if found == expected and is_recovered else 1


if __name__ == "__main__":
    sys.exit(main())
