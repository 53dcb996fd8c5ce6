"""Why the prefix ended here: the place, the cause and the edit, for known patterns."""

from __future__ import annotations

import json
import unicodedata
from collections.abc import Callable
from copy import deepcopy
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from patchkv_agents.context import (
    ContextVersion,
    EditKind,
    infer_edits,
    parse_messages,
    parse_template_args,
    parse_tools,
    render,
)
from patchkv_agents.context.explaining.causes import Cause
from patchkv_agents.context.explaining.explain import Explanation, explain

Messages = list[dict[str, Any]]

PROSE = (
    "The harbour office keeps one ledger for ice and one for bait. Boats that owe for either are "
    "not fuelled until a clerk has crossed the line out."
)


def tool(name: str, description: str = "Looks something up.") -> dict[str, Any]:
    parameters = {"type": "object", "properties": {"key": {"type": "string"}}}
    function = {"name": name, "description": description, "parameters": parameters}
    return {"type": "function", "function": function}


TOOLS = [tool("ledger"), tool("tides"), tool("weather")]


def call(index: int, arguments: Any, **more: Any) -> dict[str, Any]:
    function = {"name": "ledger", "arguments": arguments}
    calls = [{"id": f"c{index}", "type": "function", "function": function}]
    return {"role": "assistant", "content": "Looking.", "tool_calls": calls, **more}


def result(index: int, content: str) -> dict[str, Any]:
    return {"role": "tool", "tool_call_id": f"c{index}", "content": content}


def base() -> Messages:
    """An episode: 0 system, 1 user, then rounds of a call and its result, a user at the end."""
    messages: Messages = [
        {"role": "system", "content": "You keep the harbour's books. " + PROSE},
        {"role": "user", "content": "Which boats owe for ice? " + PROSE},
    ]
    for n in range(4):
        messages.append(call(n, f'{{"key": "ice", "page": {n}}}'))
        messages.append(result(n, f"Page {n} of the ledger lists boat {7 * n + 3}. {PROSE}"))
    messages.append({"role": "assistant", "content": "Two boats owe. " + PROSE})
    messages.append({"role": "user", "content": "Name them."})
    return messages


def version(messages: Messages, tools: Any = TOOLS, **args: Any) -> ContextVersion:
    frozen = parse_messages(messages), parse_tools(tools), parse_template_args(args)
    return ContextVersion("", *frozen)


@pytest.fixture
def why(smollm2_tokenizer: Any) -> Callable[..., Explanation]:
    """Explain the step from one list of messages or version to another; checks the place."""

    def run(old: Any, new: Any, tokenizer: Any = smollm2_tokenizer, **more: Any) -> Explanation:
        a, b = (v if isinstance(v, ContextVersion) else version(v) for v in (old, new))
        found = explain(a, b, lambda v: render(v, tokenizer), **more)
        ids = [render(v, tokenizer).token_ids.tolist() for v in (a, b)]
        p = found.prefix
        assert ids[0][:p] == ids[1][:p]
        pair = [side[p] if p < len(side) else None for side in ids]
        assert [found.token_old, found.token_new] == pair
        assert pair[0] != pair[1] or pair == [None, None]
        assert found.lost == len(ids[1]) - p
        return found

    return run


def changed(index: int, **fields: Any) -> Messages:
    messages = base()
    messages[index] = {**messages[index], **fields}
    return messages


def with_system(text: str) -> Messages:
    return changed(0, content=text + PROSE)


CLEARED = "Result no longer available"
REMINDER = "<note>Amounts are in crowns; never round them; the clerk signs on Fridays.</note>"


def cleared(*indices: int) -> Messages:
    messages = base()
    for index in indices:
        messages[index]["content"] = CLEARED
    return messages


def moved_reminder() -> tuple[Messages, Messages]:
    old = changed(1, content=base()[1]["content"] + "\n\n" + REMINDER)
    new = [*base(), {"role": "assistant", "content": "Gannet and Petrel."}]
    new.append({"role": "user", "content": "And for bait?\n\n" + REMINDER})
    return old, new


def moved_message() -> tuple[Messages, Messages]:
    note = {"role": "user", "content": REMINDER}
    messages = base()
    return [*messages[:2], note, *messages[2:]], [*messages, note]


def dropped(*indices: int) -> Messages:
    return [message for index, message in enumerate(base()) if index not in indices]


IN_MESSAGES = {
    "clock in the system prompt": (
        with_system("It is 2031-01-21T17:41:07Z. "),
        with_system("It is 2031-01-21T17:41:52Z. "),
        Cause.VOLATILE_TEXT,
        0,
        "a time or date: '2031-01-21T17:41:07Z'",
    ),
    "date in words": (
        with_system("Today is Tuesday, 21 January 2031. "),
        with_system("Today is Wednesday, 22 January 2031. "),
        Cause.VOLATILE_TEXT,
        0,
        "'Tuesday' became 'Wednesday'",
    ),
    "day of a month": (
        with_system("Today is the 21st of January. "),
        with_system("Today is the 22nd of January. "),
        Cause.VOLATILE_TEXT,
        0,
        "a time or date: '21st'",
    ),
    "counter in the system prompt": (
        with_system("Step 9 of 40. "),
        with_system("Step 10 of 40. "),
        Cause.VOLATILE_TEXT,
        0,
        "a number: '9' became '10'",
    ),
    "request id in the system prompt": (
        with_system("Session 6fa459ea-ee8a-4ca4-894e-db77e160355e. "),
        with_system("Session 16fd2706-8baf-433b-82eb-8c7fada847da. "),
        Cause.VOLATILE_TEXT,
        0,
        "an id: '6fa459ea-",
    ),
    "time in a user message": (
        changed(1, content="[08:15] " + PROSE),
        changed(1, content="[08:16] " + PROSE),
        Cause.VOLATILE_TEXT,
        1,
        "'08:15' became '08:16'",
    ),
    "system prompt rewritten": (
        with_system("You are strict. "),
        with_system("You are friendly at 17:41. "),
        Cause.SYSTEM_REWRITTEN,
        0,
        "'strict.' became 'friendly at 17:41.'",
    ),
    "system message is new": (
        dropped(0),
        base(),
        Cause.SYSTEM_REWRITTEN,
        0,
        "is new",
    ),
    "sorted arguments": (
        base(),
        changed(4, tool_calls=call(1, '{"page": 1, "key": "ice"}')["tool_calls"]),
        Cause.RESERIALIZED,
        4,
        "keys in another order",
    ),
    "compact arguments": (
        base(),
        changed(4, tool_calls=call(1, '{"key":"ice","page":1}')["tool_calls"]),
        Cause.RESERIALIZED,
        4,
        "other spacing or notation",
    ),
    "decomposed text": (
        changed(1, content="Whose is the Bárði? " + PROSE),
        changed(1, content=unicodedata.normalize("NFD", "Whose is the Bárði? ") + PROSE),
        Cause.RESERIALIZED,
        1,
        "another Unicode form",
    ),
    "white space": (
        base(),
        changed(8, content="Looking. \n"),
        Cause.RESERIALIZED,
        8,
        "other white space",
    ),
    "reasoning dropped": (
        changed(2, reasoning="Ice first, then bait."),
        base(),
        Cause.REASONING_DROPPED,
        2,
        "",
    ),
    "reminder block moved": (*moved_reminder(), Cause.TEXT_MOVED, 1, "is in new message 13"),
    "reminder message moved": (*moved_message(), Cause.TEXT_MOVED, 2, "<note>Amounts"),
    "one result cleared": (
        base(),
        changed(3, content="[gone]"),
        Cause.RESULTS_CLEARED,
        3,
        "'[gone]'",
    ),
    "results cleared in other words": (base(), cleared(3, 5), Cause.RESULTS_CLEARED, 3, CLEARED),
    "result is empty now": (base(), changed(3, content="[]"), Cause.RESULT_REPLACED, 3, "'[]'"),
    "result is short now": (
        base(),
        changed(3, content="Nobody owes."),
        Cause.RESULT_REPLACED,
        3,
        "became 'Nobody owes.'",
    ),
    "result read again": (
        base(),
        changed(3, content=f"Page 0 of the ledger lists boat 4. {PROSE}"),
        Cause.RESULT_REPLACED,
        3,
        "only times and numbers differ",
    ),
    "front trimmed": (base(), dropped(1, 2, 3), Cause.FRONT_TRIMMED, 1, "messages 1 to 3"),
    "front trimmed behind the request": (
        base(),
        dropped(2, 3, 4, 5),
        Cause.FRONT_TRIMMED,
        2,
        "messages 2 to 5",
    ),
    "middle deleted": (base(), dropped(6, 7), Cause.DELETED, 6, "is gone"),
    "inserted": (
        base(),
        [*base()[:6], {"role": "user", "content": "Be quick."}, *base()[6:]],
        Cause.INSERTED,
        6,
        "'Be quick.'",
    ),
    "argument truncated": (
        changed(2, tool_calls=call(0, {"key": 3 * PROSE})["tool_calls"]),
        changed(2, tool_calls=call(0, {"key": PROSE[:20] + " (cut)"})["tool_calls"]),
        Cause.TRUNCATED,
        2,
        "characters became",
    ),
    "summary": (
        base(),
        [*base()[:2], {"role": "user", "content": "So far: boats 3 and 10."}, *base()[10:]],
        Cause.SUMMARIZED,
        2,
        "8 messages became 1",
    ),
    "assistant corrected": (
        base(),
        changed(10, content="Three boats owe. " + PROSE),
        Cause.CHANGED,
        10,
        "'Two' became 'Three'",
    ),
}


@pytest.mark.parametrize("name", IN_MESSAGES)
def test_patterns_in_messages(name: str, why: Callable[..., Explanation]) -> None:
    old, new, cause, message, detail = IN_MESSAGES[name]
    found = why(old, new)
    assert (found.finding.cause, found.message_old) == (cause, message)
    assert detail in found.finding.detail
    edit = found.finding.edit
    assert edit is not None and message in (*edit.old_indices, *edit.new_indices)
    assert found.text_old != found.text_new
    assert found.verified
    assert cause.summary and cause.remedy.endswith(".")


def test_places_of_what_is_trimmed_differ_from_new_messages(
    why: Callable[..., Explanation],
) -> None:
    """The prefix ends at old message 1, where message 4 stands now."""
    found = why(base(), dropped(1, 2, 3))
    assert (found.message_old, found.message_new) == (1, 1)
    assert found.later == ()  # the three edits are one event


@pytest.mark.parametrize(
    ("new", "detail"),
    [
        (base(), "goes on"),
        ([*base(), {"role": "assistant", "content": "Gannet."}], "goes on"),
        (base()[:6], "beginning"),
    ],
    ids=["the same", "appended", "rolled back"],
)
def test_nothing_lost(new: Messages, detail: str, why: Callable[..., Explanation]) -> None:
    found = why(base(), new)
    assert found.finding.cause is Cause.NOTHING_LOST and found.later == ()
    assert detail in found.finding.detail


TOOL_LISTS = {
    "reordered": (TOOLS[::-1], Cause.TOOLS_REORDERED, "at place 0 was ledger, now weather"),
    "one more": ([*TOOLS, tool("bait")], Cause.TOOLS_CHANGED, "new: bait"),
    "one less": (TOOLS[1:], Cause.TOOLS_CHANGED, "gone: ledger"),
    "other text": ([tool("ledger", "Reads it."), *TOOLS[1:]], Cause.TOOLS_CHANGED, "changed: led"),
    "other key order": (
        [*TOOLS[:2], dict(reversed(TOOLS[2].items()))],
        Cause.TOOLS_RESERIALIZED,
        "weather",
    ),
}


@pytest.mark.parametrize("name", TOOL_LISTS)
def test_patterns_in_tools(name: str, why: Callable[..., Explanation]) -> None:
    """A later change of a message is named as what would end the prefix next."""
    tools, cause, detail = TOOL_LISTS[name]
    new = changed(3, content="Nobody owes.")
    found = why(version(base()), version(new, tools))
    assert found.finding.cause is cause and detail in found.finding.detail
    assert found.finding.edit is not None and found.finding.edit.scope == "tools"
    assert [finding.cause for finding in found.later] == [Cause.RESULT_REPLACED]


def test_clock_in_a_tool(why: Callable[..., Explanation]) -> None:
    clocks = [[tool("ledger", f"As of 17:4{n}."), *TOOLS[1:]] for n in (1, 2)]
    found = why(version(base(), clocks[0]), version(base(), clocks[1]))
    assert found.finding.cause is Cause.VOLATILE_TEXT
    assert "ledger: '17:41' became '17:42'" in found.finding.detail


TOOLS_LAST = """\
{%- for message in messages %}
{%- if tools and loop.last %}{{- '<|im_start|>system\\n' + (tools | tojson) + '<|im_end|>\\n' }}
{%- endif %}{{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}
{%- endfor %}{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{% endif %}"""

WITH_MODE = """\
{{- '<|im_start|>system\\nMode: ' + (mode or 'plain') + '<|im_end|>\\n' }}
{%- for message in messages %}
{{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}
{%- endfor %}{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{% endif %}"""


def test_a_message_is_to_blame_where_tools_come_after_it(
    why: Callable[..., Explanation], tokenizer_with: Callable[[str], Any]
) -> None:
    """Changed tools are not always the first difference: templates may show them last."""
    new = version(changed(3, content="Nobody owes."), TOOLS[::-1])
    found = why(version(base()), new, tokenizer_with(TOOLS_LAST))
    assert (found.finding.cause, found.message_old) == (Cause.RESULT_REPLACED, 3)
    assert [finding.cause for finding in found.later] == [Cause.TOOLS_REORDERED]


def test_template_that_moves_the_tools(
    why: Callable[..., Explanation], tokenizer_with: Callable[[str], Any]
) -> None:
    new = [*base(), {"role": "assistant", "content": "Gannet."}]
    found = why(base(), new, tokenizer_with(TOOLS_LAST))
    assert found.finding.cause is Cause.TEMPLATE_MOVES_TOOLS and found.finding.edit is None


def test_template_arguments(
    why: Callable[..., Explanation], tokenizer_with: Callable[[str], Any]
) -> None:
    old, new = version(base(), mode="plain"), version(base()[:-1], TOOLS[::-1], mode="terse")
    found = why(old, new, tokenizer_with(WITH_MODE))
    assert found.finding.cause is Cause.TEMPLATE_ARGS_CHANGED
    assert 'mode: "plain" became "terse"' in found.finding.detail


def test_template_that_drops_reasoning(why: Callable[..., Explanation], qwen3: Any) -> None:
    """Qwen3 shows reasoning behind the last user message only: a new one drops what came before."""
    old = base()[:-1]
    for index in (2, 4):
        old[index]["reasoning"] = "The ledger first, as always. " + PROSE
    new = [*deepcopy(old), {"role": "user", "content": "Name them."}]
    found = why(old, new, qwen3)
    assert found.finding.cause is Cause.TEMPLATE_DROPS_REASONING
    assert (found.message_old, found.message_new) == (2, 2)
    assert "message 2" in found.finding.detail


def test_template_that_rewrites_an_earlier_turn(
    why: Callable[..., Explanation], tokenizer_with: Callable[[str], Any]
) -> None:
    template = """\
{%- for message in messages %}{{- '<|im_start|>' + message.role + (' last' if loop.last else '') }}
{{- '\\n' + message.content + '<|im_end|>\\n' }}{% endfor %}"""
    new = [*base(), {"role": "assistant", "content": "Gannet."}]
    found = why(version(base(), ()), version(new, ()), tokenizer_with(template))
    assert (found.finding.cause, found.message_old) == (Cause.TEMPLATE_REWRITES, 11)


def test_declared_edits_give_their_name_and_redacted_text_is_not_shown(
    why: Callable[..., Explanation],
) -> None:
    old = changed(1, content="My code is 8841-KESTREL. " + PROSE)
    new = changed(1, content="My code is [masked]. " + PROSE)
    edits = infer_edits(version(old), version(new))
    said = [replace(edit, kind=EditKind.REDACT, declared=True) for edit in edits]
    found = why(old, new, edits=said)
    assert found.finding.cause is Cause.REDACTED
    assert "KESTREL" not in repr(found)


def test_a_plan_that_is_revised_by_an_appended_message_costs_nothing(
    why: Callable[..., Explanation],
) -> None:
    new = [*base(), {"role": "tool", "tool_call_id": "call_9", "content": "The plan is now: go."}]
    edits = infer_edits(version(base()), version(new))
    said = [replace(edit, kind=EditKind.REVISE_PLAN, declared=True) for edit in edits]
    assert why(base(), new, edits=said).finding.cause is Cause.NOTHING_LOST


SHARED = {
    "01-stale-departure-board": (Cause.RESULT_REPLACED, 9),
    "03-clear-first-search": (Cause.RESULTS_CLEARED, 3),
    "04-sliding-clear": (Cause.RESULTS_CLEARED, 3),
    "06-summary-of-six-steps": (Cause.SUMMARIZED, 2),
    "08-plan-revised": (Cause.RESULT_REPLACED, 7),
    "09-thinking-dropped": (Cause.REASONING_DROPPED, 2),
    "10-minute-in-system-prompt": (Cause.VOLATILE_TEXT, 0),
    "12-reminder-block-moves": (Cause.TEXT_MOVED, 16),
    "14-tool-arguments-reserialised": (Cause.RESERIALIZED, 2),
    "15-tool-list-reordered": (Cause.TOOLS_REORDERED, 0),
    "18-old-write-arguments-truncated": (Cause.TRUNCATED, 12),
    "20-head-and-tail": (Cause.FRONT_TRIMMED, 3),
    "21-redacted-email-and-code": (Cause.CHANGED, 3),
    "22-synthetic-tool-results-inserted": (Cause.INSERTED, 10),
    "25-one-of-four-copies-deleted": (Cause.TRUNCATED, 7),
    "26-evidence-refreshed-and-reordered": (Cause.RESULT_REPLACED, 3),
    "30-unicode-and-borders": (Cause.RESULT_REPLACED, 3),
    "31-literal-control-tokens": (Cause.RESULT_REPLACED, 3),
    "32-huge-middle-five-lines": (Cause.RESULT_REPLACED, 3),
}


@pytest.mark.parametrize("case", SHARED)
def test_realistic_edits(case: str, shared_dir: Path, why: Callable[..., Explanation]) -> None:
    path = shared_dir / "edits" / f"{case}.json"
    if not path.is_file():
        pytest.skip(f"{path} is not there")
    content = json.loads(path.read_text(encoding="utf-8"))
    old = version(content["old"], content["tools"])
    new = version(content["new"], content.get("tools_new", content["tools"]))
    found = why(old, new)
    assert (found.finding.cause, found.message_old) == SHARED[case]
