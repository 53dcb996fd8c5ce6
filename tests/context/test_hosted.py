"""Token counts for hosted models: by tiktoken where its vocabulary is there, else estimated."""

from __future__ import annotations

import json
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tiktoken

from patchkv_agents.alignment import align
from patchkv_agents.context import ContextVersion, parse_messages, parse_tools
from patchkv_agents.context.rendering import hosted as module
from patchkv_agents.context.rendering.hosted import is_hosted, load_hosted
from patchkv_agents.errors import InputError

CALL = {"id": "c1", "type": "function", "function": {"name": "board", "arguments": '{"n": 1}'}}
MESSAGES: list[dict[str, Any]] = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": [{"type": "text", "text": "Which track?"}]},
    {"role": "assistant", "content": "", "reasoning": "The board knows.", "tool_calls": [CALL]},
    {"role": "tool", "tool_call_id": "c1", "content": "Track 3 <|endoftext|>, 10:05."},
]
TOOLS = [{"type": "function", "function": {"name": "board", "parameters": {"type": "object"}}}]


def version(messages: list[dict[str, Any]] = MESSAGES) -> ContextVersion:
    return ContextVersion("", parse_messages(messages), parse_tools(TOOLS))


@pytest.fixture
def bytes_only(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """A real tiktoken encoding whose tokens are bytes stands for every one; lists what is asked."""
    encoding = tiktoken.Encoding(
        "bytes",
        pat_str=r"[\s\S]+",
        mergeable_ranks={bytes([i]): i for i in range(256)},
        special_tokens={"<|endoftext|>": 256},
    )
    asked: list[str] = []

    def get(name: str) -> tiktoken.Encoding:
        asked.append(name)
        return encoding

    monkeypatch.setattr(tiktoken, "get_encoding", get)
    return asked


def test_names() -> None:
    for name in (
        "gpt-4o",
        "gpt-4o-2024-08-06",
        "gpt-5-mini",
        "o3",
        "claude-opus-4",
        "gemini-3-pro",
    ):
        assert is_hosted(name)
    for name in ("smollm2", "gpt2", "gpt-oss-20b", "Qwen/Qwen3-8B", "openai/gpt-4o", ""):
        assert not is_hosted(name)
    with pytest.raises(InputError, match="no hosted model"):
        load_hosted("smollm2")


def test_counts_are_those_of_the_encoding(bytes_only: list[str]) -> None:
    """What is counted is the text, field by field, and a look-alike of a token is text."""
    tokenizer = load_hosted("gpt-4o")
    assert bytes_only == ["o200k_base"]
    assert not tokenizer.estimate
    assert "o200k_base" in tokenizer.counting and "framing" in tokenizer.counting
    context = version()
    rendered = tokenizer.render(context)
    texts = [
        context.tools[0].text,
        "Be brief.",
        "Which track?",
        'The board knows.board{"n": 1}',
        "Track 3 <|endoftext|>, 10:05.",
    ]
    assert rendered.text == "".join(texts)
    assert bytes(rendered.token_ids.tolist()).decode() == rendered.text
    sizes = [len(text) for text in texts]
    stops = np.cumsum(sizes).tolist()
    assert rendered.message_spans == tuple(zip(stops[:-1], stops[1:], strict=True))
    assert not rendered.verified and rendered.reason == tokenizer.counting
    fields = [(part.message, part.field) for part in rendered.part_spans]
    assert fields == [
        (-1, "tools[0]"),
        (0, "content"),
        (1, "content[0]"),
        (2, "reasoning"),
        (2, "tool_calls[0].name"),
        (2, "tool_calls[0].arguments"),
        (3, "content"),
    ]
    assert tokenizer.decode(ord("B")) == "B"


def test_images_are_named_as_not_counted(bytes_only: list[str]) -> None:
    image = {"type": "image_url", "image_url": {"url": "https://example.org/a.png"}}
    messages = [{"role": "user", "content": [image, {"type": "text", "text": "What is it?"}]}]
    rendered = load_hosted("gpt-4o").render(version(messages))
    assert rendered.omitted == ((0, "content[0]"),)
    assert rendered.text.endswith("What is it?")


@pytest.mark.parametrize(
    ("model", "reason"),
    [
        ("gpt-4o", "o200k_base cannot be loaded (ConnectionError"),
        ("claude-opus-4", "the maker of claude-opus-4 publishes no vocabulary"),
    ],
)
def test_estimates_say_so(model: str, reason: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(name: str) -> None:
        raise ConnectionError("no route to host")

    monkeypatch.setattr(tiktoken, "get_encoding", fail)
    tokenizer = load_hosted(model)
    assert tokenizer.estimate
    assert "estimates" in tokenizer.counting and reason in tokenizer.counting
    rendered = tokenizer.render(version())
    again = "".join(tokenizer.decode(token) for token in rendered.token_ids.tolist())
    assert again == rendered.text
    assert tokenizer.encode("ice ice ice")[1:] == 2 * tokenizer.encode(" ice")
    assert tokenizer.encode("ice") != tokenizer.encode("bait")


def test_a_network_that_does_not_answer_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """tiktoken sets no timeout: behind a firewall that drops packets it waited for minutes."""
    released = threading.Event()
    monkeypatch.setattr(tiktoken, "get_encoding", lambda name: released.wait(60))
    monkeypatch.setattr(module, "_TIMEOUT_S", 0.05)
    try:
        assert "did not arrive within" in load_hosted("gpt-4o").counting
    finally:
        released.set()


def test_an_edit_is_found_in_the_estimated_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tiktoken, "get_encoding", lambda name: 1 / 0)
    tokenizer = load_hosted("gpt-4o")
    prose = " ".join(f"Row {n} holds {n * n} crates of salted herring." for n in range(30))
    old = [*MESSAGES, {"role": "assistant", "content": prose}]
    new = [*MESSAGES[:3], {**MESSAGES[3], "content": "Track 11."}, old[4]]
    a, b = tokenizer.render(version(old)), tokenizer.render(version(new))
    alignment = align(a.token_ids, b.token_ids)
    assert len(alignment.hunks) == 1
    start, stop = b.message_spans[4]
    assert (alignment.position_map()[start:stop] >= 0).all()


# Tokens of the old version in o200k_base's real vocabulary (by bpe-openai 0.1.4).
O200K = {
    "01-stale-departure-board": 5121,
    "08-plan-revised": 4420,
    "14-tool-arguments-reserialised": 6033,
    "30-unicode-and-borders": 3077,
}


@pytest.mark.parametrize("case", O200K)
def test_estimates_are_near_the_real_counts(
    case: str, shared_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = shared_dir / "edits" / f"{case}.json"
    if not path.is_file():
        pytest.skip(f"{path} is not there")
    monkeypatch.setattr(tiktoken, "get_encoding", lambda name: 1 / 0)
    content = json.loads(path.read_text(encoding="utf-8"))
    context = ContextVersion("", parse_messages(content["old"]), parse_tools(content["tools"]))
    count = len(load_hosted("gpt-4o").render(context))
    assert count == pytest.approx(O200K[case], rel=0.1)
