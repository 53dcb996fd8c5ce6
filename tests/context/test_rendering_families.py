"""Real conversations through the templates of several families.

With the embedded tokenizer, to which each family's control tokens are added, and templates of our
own writing (see `templates`). Where PATCHKV_TOKENIZERS names a folder of tokenizers (one folder
each, as `save_pretrained` writes them), also with these and their own templates.
"""

from __future__ import annotations

import copy
import json
import os
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from patchkv_agents.context import RenderedContext, parse_messages, render
from patchkv_agents.errors import InputError

from .rendered import check, control_tokens, decoded
from .templates import FAMILIES, Family

TOOLS = [
    {
        "type": "function",
        "function": {
            "name": name,
            "description": f"The {name}, café style.",
            "parameters": {"type": "object", "properties": {"stop": {"type": "string"}}},
        },
    }
    for name in ("board", "map")
]


def call(call_id: str, name: str, **arguments: Any) -> dict[str, Any]:
    return {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}


def conversation(calls: int) -> list[dict[str, Any]]:
    """An episode with reasoning and many scripts; one message calls `calls` tools."""
    first = [
        call("call00001", "board", stop="Kai Ufer", at=[9, 40]),
        call("call00002", "map", stop="港\n口"),
    ]
    results = ['{"track": 4, "zug": "Süd"}', "  Gleis 4 hinter dem Kiosk 🙂‍↕️\n"]
    asked = [
        {"role": "system", "content": "You look things up. Du antwortest kurz."},
        {"role": "user", "content": "  When does the 9:40 leave?\n"},
    ]
    answered = [
        {"role": "assistant", "content": "From track 4.", "reasoning": "รถไฟ is late; يوم."},
        {"role": "user", "content": "And the 10:10? 谢谢"},
    ]
    if calls == 0:
        return [*asked, *answered]
    made = [
        {
            "role": "assistant",
            "content": "",
            "reasoning": "The board knows.",
            "tool_calls": first[:calls],
        },
        *(
            {"role": "tool", "tool_call_id": one["id"], "name": one["function"]["name"]}
            | {"content": result}
            for one, result in zip(first, results, strict=False)
        ),
    ]
    return [*asked, *made[: calls + 1], *answered]


def reference(tokenizer: Any, messages: Sequence[dict], tools: Any, **options: Any) -> list[int]:
    """What the tokenizer itself makes of the messages."""
    chat = [
        message | {"reasoning_content": message["reasoning"]} if "reasoning" in message else message
        for message in messages
    ]
    ids: list[int] = tokenizer.apply_chat_template(
        chat, tools=tools, add_generation_prompt=True, return_dict=False, **options
    )
    return ids


def check_spans(rendered: RenderedContext, tokenizer: Any, messages: list[dict]) -> None:
    """Each message has its own text in its span, and no other message's."""
    texts = decoded(tokenizer, rendered)
    shown = {(part.message, part.field) for part in rendered.part_spans}
    assert {(index, "content") for index in range(len(messages))} <= shown | {
        (index, "content") for index, message in enumerate(messages) if not message["content"]
    }
    for index, (message, text) in enumerate(zip(messages, texts, strict=True)):
        core = message["content"].strip()
        assert core in text or json.dumps(core, ensure_ascii=False)[1:-1] in text
        for one in message.get("tool_calls", ()):
            assert one["function"]["name"] in text
            assert one["function"]["arguments"]["stop"].split("\n")[0] in text
        others = [m["content"].strip() for n, m in enumerate(messages) if n != index]
        assert not any(other and other in text for other in others)


def hostile(messages: Sequence[dict], controls: Sequence[str]) -> list[dict[str, Any]]:
    """The conversation with look-alikes of control tokens in every text of users and tools."""
    evil = "".join(controls) + f" x{controls[-1][:-1]} {controls[0]}"
    changed = copy.deepcopy(list(messages))
    for message in changed:
        if message["role"] != "assistant":
            message["content"] = f"a {evil} b"
        for one in message.get("tool_calls", ()):
            one["function"]["arguments"]["stop"] = evil
    return changed


@pytest.mark.parametrize("name", FAMILIES)
def test_family(family_tokenizer: Callable[[str], Any], name: str) -> None:
    tokenizer, family = family_tokenizer(name), FAMILIES[name]
    check_family(tokenizer, family, conversation(family.calls))


def check_family(tokenizer: Any, family: Family, messages: list[dict[str, Any]]) -> None:
    tools = TOOLS if family.calls else None
    rendered = render(messages, tokenizer, tools=tools)
    check(rendered, tokenizer, ascending=family is not FAMILIES["mistral"])
    assert rendered.token_ids.tolist() == reference(tokenizer, messages, tools)
    check_spans(rendered, tokenizer, messages)
    attacked = hostile(messages, [*family.special, *family.other])
    defended = render(attacked, tokenizer, tools=tools)
    check(defended, tokenizer, ascending=family is not FAMILIES["mistral"])
    check_spans(defended, tokenizer, [m | {"content": ""} for m in attacked])
    assert control_tokens(tokenizer, defended) == control_tokens(tokenizer, rendered)
    # What was not attacked has the tokens it had.
    for index, message in enumerate(messages):
        if message["role"] == "assistant" and not message.get("tool_calls"):
            a, b = rendered.message_spans[index]
            c, d = defended.message_spans[index]
            assert rendered.token_ids[a:b].tolist() == defended.token_ids[c:d].tolist()


def spans(family_tokenizer: Callable[[str], Any], name: str) -> list[str]:
    tokenizer, family = family_tokenizer(name), FAMILIES[name]
    rendered = render(
        conversation(family.calls), tokenizer, tools=TOOLS[:1] if family.calls else None
    )
    return decoded(tokenizer, rendered)


def test_spans_of_qwen3(family_tokenizer: Callable[[str], Any]) -> None:
    shown = spans(family_tokenizer, "qwen3")
    assert shown[2].startswith('<|im_start|>assistant\n<tool_call>\n{"name": "board"')
    assert shown[2].count("<tool_call>") == 2 and shown[2].endswith("</tool_call><|im_end|>\n")
    # Results in a row share a turn.
    assert shown[3].startswith("<|im_start|>user\n<tool_response>\n{")
    assert shown[4].startswith("<tool_response>\n  Gleis") and shown[4].endswith("<|im_end|>\n")
    assert shown[5] == "<|im_start|>assistant\nFrom track 4.<|im_end|>\n"


def test_thinking_off_in_qwen3(family_tokenizer: Callable[[str], Any]) -> None:
    """The prompt then ends in an empty think block, which belongs to no message."""
    tokenizer, messages = family_tokenizer("qwen3"), conversation(2)
    rendered = render(messages, tokenizer, template_args={"enable_thinking": False})
    check(rendered, tokenizer)
    assert rendered.token_ids.tolist() == reference(
        tokenizer, messages, None, enable_thinking=False
    )
    prompt = rendered.token_ids[rendered.message_spans[-1][1] :]
    assert tokenizer.decode(prompt) == "<|im_start|>assistant\n<think>\n\n</think>\n\n"


def test_spans_of_llama3(family_tokenizer: Callable[[str], Any]) -> None:
    shown = spans(family_tokenizer, "llama3")
    head = "<|start_header_id|>{}<|end_header_id|>\n\n"
    assert shown[0].startswith(head.format("system") + "Environment") and "2024" in shown[0]
    assert shown[1].startswith(head.format("user") + "Answer with")
    assert shown[1].endswith("When does the 9:40 leave?<|eot_id|>")
    assert shown[2].startswith(head.format("assistant") + '{"name": "board", "parameters"')
    assert shown[3] == head.format("ipython") + r'"{\"track\": 4, \"zug\": \"Süd\"}"<|eot_id|>'
    # It takes one call in a message, and hides text beside one: they become messages of their own.
    messages = conversation(2)
    messages[2]["content"] = "I look."
    rendered = render(messages, family_tokenizer("llama3"))
    start, stop = rendered.message_spans[2]
    assert rendered.verified and rendered.omitted == ((2, "reasoning"), (5, "reasoning"))
    turns = family_tokenizer("llama3").decode(rendered.token_ids[start:stop]).split("<|eot_id|>")
    assert [turn.removeprefix(head.format("assistant"))[:16] for turn in turns] == [
        "I look.",
        '{"name": "board"',
        '{"name": "map", ',
        "",
    ]


def test_date_of_llama3(family_tokenizer: Callable[[str], Any]) -> None:
    """Templates that show the date change the head of every context at midnight."""
    tokenizer = family_tokenizer("llama3")
    old, new = (
        render(conversation(0), tokenizer, template_args={"date_string": f"{day} May 2025"})
        for day in (1, 2)
    )
    assert old.verified and new.verified
    (_, a), (_, b) = old.message_spans[0], new.message_spans[0]
    assert old.token_ids[:a].tolist() != new.token_ids[:b].tolist()
    assert old.token_ids[a:].tolist() == new.token_ids[b:].tolist()


def test_spans_of_gemma3(family_tokenizer: Callable[[str], Any]) -> None:
    tokenizer = family_tokenizer("gemma3")
    assert spans(family_tokenizer, "gemma3") == [
        "<start_of_turn>user\nYou look things up. Du antwortest kurz.\n\n",
        "When does the 9:40 leave?<end_of_turn>\n",
        "<start_of_turn>model\nFrom track 4.<end_of_turn>\n",
        "<start_of_turn>user\nAnd the 10:10? 谢谢<end_of_turn>\n",
    ]
    assert render(conversation(0), tokenizer).message_spans[0][0] == 1  # <bos> belongs to none
    with pytest.raises(InputError, match="refuses these messages: Conversation roles must alt"):
        render(conversation(0)[1:2] * 2, tokenizer)


def test_spans_of_glm4(family_tokenizer: Callable[[str], Any]) -> None:
    shown = spans(family_tokenizer, "glm4")
    assert shown[0] == "<|system|>\nYou look things up. Du antwortest kurz."
    assert shown[1] == "<|user|>\n  When does the 9:40 leave?\n"
    assert shown[2].startswith('<|assistant|>board\n{"stop": "Kai Ufer", "at": [9, 40]}<|assistant')
    assert shown[3] == '<|observation|>\n{"track": 4, "zug": "Süd"}'
    assert shown[4].startswith("<|observation|>\n  Gleis 4")
    assert shown[5] == "<|assistant|>\nFrom track 4."


def test_spans_of_mistral(family_tokenizer: Callable[[str], Any]) -> None:
    shown = spans(family_tokenizer, "mistral")
    # In the last turn, where the template shows it; the tools before it belong to no message.
    assert shown[0] == "[INST]You look things up. Du antwortest kurz.\n\n"
    assert shown[1] == "[INST]  When does the 9:40 leave?\n[/INST]"
    assert shown[2].startswith('[TOOL_CALLS][{"name": "board", "arguments": {"stop": "Kai Ufer"')
    assert shown[2].endswith('"id": "call00002"}]</s>')
    assert shown[3].startswith(r'[TOOL_RESULTS]{"content": "{\"track\": 4')
    assert shown[4].endswith('"call_id": "call00002"}[/TOOL_RESULTS]')
    assert shown[5] == " From track 4.</s>"
    assert shown[6] == "And the 10:10? 谢谢[/INST]"
    messages = conversation(2)
    messages[2]["tool_calls"][0]["function"]["arguments"] = '{"b": 1,  "a": 2}'
    text = render(messages, family_tokenizer("mistral")).text
    assert '"arguments": {"b": 1, "a": 2}' in text  # the template cannot take a string
    messages[2]["tool_calls"][0]["id"] = "c1"
    messages[3]["tool_call_id"] = "c1"
    text = render(messages, family_tokenizer("mistral")).text
    (made,) = re.findall(r'"arguments": {"b": 1, "a": 2}, "id": "(\w{9})"', text)
    assert f'"call_id": "{made}"' in text


# Real tokenizers


def real_tokenizers() -> list[Any]:
    folder = os.environ.get("PATCHKV_TOKENIZERS")
    found = sorted(Path(folder).glob("*/tokenizer.json")) if folder else []
    if found:
        return [pytest.param(path.parent, id=path.parent.name) for path in found]
    reason = "PATCHKV_TOKENIZERS names no folder with folders of tokenizers"
    return [pytest.param(None, marks=pytest.mark.skip(reason=reason), id="none")]


@pytest.fixture(scope="module")
def load() -> Callable[[Path], Any]:
    from transformers import AutoTokenizer

    loaded: dict[Path, Any] = {}

    def load_one(folder: Path) -> Any:
        if folder not in loaded:
            loaded[folder] = AutoTokenizer.from_pretrained(folder, local_files_only=True)
        return loaded[folder]

    return load_one


@pytest.mark.parametrize("folder", real_tokenizers())
def test_real_tokenizer(folder: Path, load: Callable[[Path], Any]) -> None:
    """Its own template, with as much of the conversation as it takes."""
    tokenizer = load(folder)
    for calls in (2, 1, 0):
        messages = conversation(calls)
        try:
            rendered = render(messages, tokenizer, tools=TOOLS if calls else None)
        except InputError:
            continue
        names = {field.partition(".")[0] for _, field in rendered.omitted}
        if "content" not in names and not any(name.startswith("tool_calls") for name in names):
            break
    special = [str(token) for token in tokenizer.all_special_tokens]
    ours = [t for t in control_tokens(tokenizer, rendered) if t not in special]
    family = Family(tokenizer.chat_template, tuple(special), tuple(dict.fromkeys(ours)), calls)
    check_family(tokenizer, family, messages)


@pytest.mark.parametrize("folder", real_tokenizers())
def test_real_tokenizer_with_our_template(folder: Path, load: Callable[[Path], Any]) -> None:
    """The family's template as written for these tests; some that are shipped know no tools."""
    tokenizer = copy.deepcopy(load(folder))
    vocabulary = tokenizer.get_vocab()
    fitting = [f for f in FAMILIES.values() if vocabulary.keys() >= {*f.special, *f.other}]
    if not fitting:
        pytest.skip("no family of ours has these control tokens")
    (family,) = fitting
    tokenizer.chat_template = family.template
    check_family(tokenizer, family, conversation(family.calls))


@pytest.mark.parametrize("folder", real_tokenizers())
def test_shared_texts_with_real_tokenizer(
    folder: Path, load: Callable[[Path], Any], shared_dir: Path
) -> None:
    """Many scripts and quoted control tokens, as one user message each."""
    tokenizer = load(folder)
    for case in ("30-unicode-and-borders", "31-literal-control-tokens"):
        document = json.loads((shared_dir / "edits" / f"{case}.json").read_text("utf-8"))
        for message in parse_messages(document["old"]):
            text = message.text.replace("▁", "_")  # Gemma's tokenizer takes this for a space
            chat = [{"role": "user", "content": text}]
            rendered = render(chat, tokenizer)
            check(rendered, tokenizer)
            empty = render([{"role": "user", "content": "x"}], tokenizer)
            assert control_tokens(tokenizer, rendered) == control_tokens(tokenizer, empty)
