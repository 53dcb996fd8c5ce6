"""What the LangGraph examples share: a model node, a long tool result, and what is printed."""

from __future__ import annotations

import argparse
from collections.abc import Iterable
from typing import Any

from langchain_core.messages import AIMessage, BaseMessage, HumanMessage, SystemMessage, ToolMessage
from langchain_core.runnables import RunnableConfig
from langgraph.graph import MessagesState

from patchkv_agents import Engine, RecoveryPolicy
from patchkv_agents.context import ContextVersion, Message, from_langchain
from patchkv_agents.engine.reply import Reply
from patchkv_langgraph import GraphHistory

_ENTRY = (
    "Entry {0}: the barge {0} tied up at the quay, brought gravel and left with the tide; the "
    "pilot's name is in the harbour office's log, together with the hour of arrival. "
)


class Assistant:
    """The agent's model: a node that asks the engine, which shares the graph's history."""

    def __init__(self, history: GraphHistory) -> None:
        arguments = argparse.ArgumentParser()
        arguments.add_argument("model", nargs="?", default="smollm2")
        arguments.add_argument("--exact", action="store_true", help="recover exactly")
        chosen = arguments.parse_args()
        # The default policy is an approximation, chosen on purpose.
        policy = RecoveryPolicy.exact() if chosen.exact else RecoveryPolicy.default()
        self.engine = Engine.from_pretrained(chosen.model, policy=policy, history=history.store)
        self.history = history
        self.replies: list[Reply] = []
        self._asked: list[tuple[Message, ...]] = []

    def __call__(self, state: MessagesState, config: RunnableConfig) -> dict[str, Any]:
        """Answer the conversation."""
        thread = self.engine.thread(config["configurable"]["thread_id"])
        # Where the run stands: after time travel, not at the newest version.
        thread.history.checkout(self.history.version(state, config).id)
        messages = from_langchain(state["messages"], keep="shown")
        reply = thread.generate(messages, max_new_tokens=12)
        thread.suspend()  # the KV rows go to CPU memory until the next call
        self.replies.append(reply)
        self._asked.append(messages)
        return {"messages": [AIMessage(reply.text)]}

    def check(self) -> bool:
        """Print how replies came about, and which differ from those of a full prefill.

        Returns:
            Whether most of the state was recovered where the policy is the default one, and nothing
            differs where it is exact.
        """
        is_exact = self.engine.policy.is_exact
        is_right = True
        for number, (messages, reply) in enumerate(zip(self._asked, self.replies, strict=True)):
            fresh = self.engine.thread(f"check {number}").generate(messages, max_new_tokens=12)
            if fresh.text != reply.text:
                print(f"answer {number} differs: {reply.text!r}, not {fresh.text!r}")
                is_right &= not is_exact
            if number > 0:  # the first one had nothing to recover
                is_recovered = show_report(reply)
                is_right &= is_recovered or is_exact
        return is_right


def conversation(status: str, asked: str) -> list[BaseMessage]:
    """An agent that has looked up an order, and a long log after it: about 1,000 tokens."""
    calls = [("order", "order_status", {"number": 7}), ("log", "harbour_log", {"entries": 20})]
    answers = {"order": status, "log": "".join(map(_ENTRY.format, range(20)))}
    messages: list[BaseMessage] = [
        SystemMessage("You answer questions about orders from the tool results."),
        HumanMessage("Look up order 7 and the harbour log."),
    ]
    for call_id, name, arguments in calls:
        call = {"name": name, "args": arguments, "id": call_id}
        messages.append(AIMessage("", tool_calls=[call]))
        messages.append(ToolMessage(answers[call_id], name=name, tool_call_id=call_id, id=call_id))
    return [*messages, HumanMessage(asked)]


def show_log(versions: Iterable[ContextVersion]) -> set[tuple[str, str | None]]:
    """Print the edits of versions, oldest first, and return their kinds and authors."""
    found = set()
    for version in sorted(versions, key=lambda version: version.id):
        for edit in version.edits:
            found.add((str(edit.kind), edit.author))
            print(f"  {edit.kind:<20} by {edit.author or '?':<14} message {edit.new_index}")
    return found


def show_report(reply: Reply) -> bool:
    """Print how a reply's state came about. Returns whether most of it was recovered."""
    report = reply.report
    computed = report.computed
    print(
        f"  {report.tokens} tokens: {report.prefix} kept, {computed} computed, "
        f"{report.restored} restored; first token after {report.resume_ttft_ms:.0f} ms"
    )
    return report.fallback_reason is None and computed < report.tokens / 2
