from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
from langchain.agents import create_agent
from langchain.agents.middleware import ClearToolUsesEdit, ContextEditingMiddleware
from langchain_core.messages import AIMessage, AnyMessage, BaseMessage, HumanMessage, ToolMessage
from langgraph.checkpoint.memory import InMemorySaver

from patchkv_agents.errors import InputError
from patchkv_langchain.batching import Applied, EditBatching, FreedTokens
from patchkv_langchain.middleware import PatchKVMiddleware
from tests.langchain.agents import look, looking, middle_edits, saying

CLEARED = {"context_editing": {"cleared": True, "strategy": "clear_tool_uses"}}


def words(messages: Sequence[BaseMessage]) -> int:
    return sum(len(message.text.split()) for message in messages)


def result(number: int, text: str = "ten words that a tool said about some other place") -> Any:
    return ToolMessage(text, tool_call_id=f"c{number}", id=f"t{number}")


def cleared(number: int) -> ToolMessage:
    return ToolMessage(
        "[cleared]", tool_call_id=f"c{number}", id=f"t{number}", response_metadata=CLEARED
    )


STATE: list[AnyMessage] = [HumanMessage("Go."), *map(result, range(4))]


def batching(least: int, max_tokens: int = 1000) -> EditBatching:
    return EditBatching(
        max_tokens, worthwhile=lambda removed, suffix: removed >= least, count_tokens=words
    )


def texts(messages: Sequence[BaseMessage]) -> list[str]:
    return [message.text if message.text == "[cleared]" else "whole" for message in messages[1:]]


def test_clearings_wait_until_together_they_are_worth_it() -> None:
    policy, applied = batching(least=15), Applied()
    one = [STATE[0], cleared(0), *STATE[2:]]
    assert policy.batched(STATE, one, applied) == STATE
    two = [STATE[0], cleared(0), cleared(1), *STATE[3:]]
    assert texts(policy.batched(STATE, two, applied)) == ["[cleared]"] * 2 + ["whole"] * 2
    three = [STATE[0], cleared(0), cleared(1), cleared(2), STATE[4]]
    shown = policy.batched(STATE, three, applied)
    assert texts(shown) == ["[cleared]"] * 2 + ["whole"] * 2, "what was made stays, the new waits"


def test_the_rule_is_given_what_goes_and_what_lies_behind() -> None:
    asked = []

    def rule(removed: int, suffix: int) -> bool:
        asked.append((removed, suffix))
        return True

    policy = EditBatching(1000, worthwhile=rule, count_tokens=words)
    request = [*STATE[:2], cleared(1), *STATE[3:]]
    assert policy.batched(STATE, request, Applied()) == request
    assert asked == [(9, 20)]


def test_nothing_waits_where_the_room_is_needed() -> None:
    request = [STATE[0], cleared(0), *STATE[2:]]
    assert words(STATE) == 41
    assert batching(least=99, max_tokens=41).batched(STATE, request, Applied()) == STATE
    assert batching(least=99, max_tokens=40).batched(STATE, request, Applied()) == request


def test_only_what_is_made_for_room_waits() -> None:
    """A redaction in the request must reach the model's context at once."""
    redacted = [STATE[0], result(0, "[removed]"), *STATE[2:]]
    assert batching(least=99).batched(STATE, redacted, Applied()) == redacted
    dropped = [STATE[0], *STATE[2:]]
    assert batching(least=99).batched(STATE, dropped, Applied()) == dropped
    both = [STATE[0], result(0, "[removed]"), cleared(1), *STATE[3:]]
    shown = batching(least=99).batched(STATE, both, Applied())
    assert [message.text for message in shown[1:3]] == ["[removed]", STATE[2].text]


def test_arguments_and_results_of_a_call_wait_together() -> None:
    call = {"id": "c0", "name": "look", "args": {"place": "a long description of a place"}}
    state = [STATE[0], AIMessage("", tool_calls=[call]), result(0), result(1)]
    request = [message.model_copy(deep=True) for message in state]
    clear = ClearToolUsesEdit(trigger=0, keep=1, clear_tool_inputs=True)
    clear.apply(request, count_tokens=lambda messages: 1)
    assert request != state
    assert batching(least=99).batched(state, request, Applied()) == state


def test_freed_tokens_weighs_both_sides_in_computed_tokens() -> None:
    rule = FreedTokens(expected_calls=10, recompute_share=0.1, carried_cost=0.05)
    assert rule(removed=200, suffix=1000)
    assert not rule(removed=199, suffix=1000)
    exact = FreedTokens(expected_calls=10, recompute_share=1.0, carried_cost=0.05)
    assert not exact(removed=1999, suffix=1000)
    assert exact(removed=2000, suffix=1000)


def test_a_limit_is_needed() -> None:
    with pytest.raises(InputError, match="max_tokens is 0"):
        EditBatching(max_tokens=0)


def test_fewer_edits_reach_the_model_of_an_agent() -> None:
    def edits(policy: EditBatching | None) -> list[int]:
        patchkv = PatchKVMiddleware(batching=policy)
        clear = ContextEditingMiddleware(edits=[ClearToolUsesEdit(trigger=10, keep=1)])
        runner = create_agent(
            saying(looking(7)),
            [look],
            middleware=patchkv.instrument([clear]),
            checkpointer=InMemorySaver(),
        )
        runner.invoke({"messages": [HumanMessage("Go.")]}, {"configurable": {"thread_id": "t"}})
        history = patchkv.history_of("t")
        assert {edit[1] for edit in middle_edits(history)} <= {"ContextEditingMiddleware"}
        return [
            sum(edit.kind != "append" for edit in version.edits)
            for version in reversed(history.log())
        ]

    assert edits(None) == [0, 0, 1, 1, 1, 1, 1, 1]
    three = EditBatching(10_000, worthwhile=lambda removed, suffix: removed > 360)
    assert edits(three) == [0, 0, 0, 0, 3, 0, 0, 3]
