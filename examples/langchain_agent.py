"""A LangChain agent whose context is edited by LangChain's own middleware, tracked and recovered.

`ContextEditingMiddleware` clears old tool results and `SummarizationMiddleware` replaces old
messages by a summary; neither knows of PatchKV. Prefill, recovery and the KV cache are the model's;
what it says is written here (`ScriptedChatPatchKV`), since the embedded model of 135M parameters
does not call tools reliably. With a larger model, take `ChatPatchKV(model=...)` in its place.

Run it with the embedded model: `python examples/langchain_agent.py`, or name another one.
"""

from __future__ import annotations

import sys

from langchain.agents import create_agent
from langchain.agents.middleware import (
    ClearToolUsesEdit,
    ContextEditingMiddleware,
    SummarizationMiddleware,
)
from langchain.tools import tool
from langchain_core.messages import AIMessage, HumanMessage
from langgraph.checkpoint.memory import InMemorySaver

from patchkv_agents import Engine
from patchkv_langchain import PatchKVMiddleware, ScriptedChatPatchKV

ROOMS = [
    "Tower clock {0} struck the hours for a parish and was wound by the sexton on Saturdays. ",
    "On shelf {0} stands an hourglass from a ship that carried salt along the northern coast. ",
    "Sundial {0}, cut from slate, shows noon in a monastery garden that is now a car park. ",
    "Watchmakers of street {0} signed their movements with a heron, a bell or a crescent. ",
    "Behind glass, chronometer {0} still keeps the time of an observatory that burned down. ",
    "Visitors may wind cuckoo clock {0} themselves, if a guard is there to hold the ladder. ",
]


@tool
def visit(room: int) -> str:
    """Tell what a room of the museum holds."""
    return "".join(ROOMS[room].format(number) for number in range(12))


def main() -> int:
    """Visit six rooms, and print which edits were found and what recovery did after each."""
    engine = Engine.from_pretrained(sys.argv[1] if len(sys.argv) > 1 else "smollm2")
    calls = [{"id": str(n), "name": "visit", "args": {"room": n}} for n in range(6)]
    # The policy is an approximation, chosen on purpose; without it, recovery is exact.
    model = ScriptedChatPatchKV(
        engine=engine,
        policy="default",
        answers=[*(AIMessage("", tool_calls=[call]) for call in calls), "Six rooms of clocks."],
    )
    summarizer = ScriptedChatPatchKV(
        engine=engine, policy="default", answers=["The visitor has seen rooms 0 to 3."]
    )
    patchkv = PatchKVMiddleware()  # also suspends the KV cache while a tool runs
    agent = create_agent(
        model,
        [visit],
        system_prompt="You guide visitors through a museum of clocks.",
        middleware=patchkv.instrument(
            [
                SummarizationMiddleware(summarizer, trigger=("messages", 11), keep=("messages", 4)),
                ContextEditingMiddleware(edits=[ClearToolUsesEdit(trigger=500, keep=3)]),
            ]
        ),
        checkpointer=InMemorySaver(),
    )
    config = {"configurable": {"thread_id": "visit-1"}}
    found = set()
    is_recovered = True
    given = {"messages": [HumanMessage("Show me all the rooms.")]}
    for state in agent.stream(given, config, stream_mode="values"):
        recovery = state["messages"][-1].response_metadata.get("recovery")
        if recovery is None:
            continue  # not an answer of the model
        version = patchkv.history_of("visit-1").head
        edits = [edit for edit in version.edits if edit.kind != "append"]
        computed = recovery["tokens"] - recovery["prefix"] - recovery["restored"]
        print(
            f"{recovery['tokens']:>5} tokens: {recovery['prefix']} kept, {computed} computed, "
            f"{recovery['restored']} restored; first token after {recovery['resume_ttft_ms']:.0f} "
            "ms"
        )
        for edit in edits:
            found.add((str(edit.kind), edit.author))
            print(f"      {edit.kind} by {edit.author}, message {edit.new_index}")
        if edits:
            is_recovered &= recovery["fallback_reason"] is None and recovery["restored"] > 0
    expected = {
        ("replace_tool_result", "ContextEditingMiddleware"),
        ("summarize", "SummarizationMiddleware"),
    }
    return 0 if found == expected and is_recovered else 1


if __name__ == "__main__":
    sys.exit(main())
