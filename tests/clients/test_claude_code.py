"""Claude Code, the program itself, against a server whose model is told what to say.

Needs `claude` (npm package `@anthropic-ai/claude-code`) on the path. It asks no other server.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from patchkv_agents.engine import Engine, Thread
from patchkv_agents.recovery import RecoveryPolicy
from patchkv_server import ServerSettings

from ..engine.models import tiny_engine
from ..server.serving import MODEL, Served, serving

CLAUDE = shutil.which("claude")
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(CLAUDE is None, reason="npm install -g @anthropic-ai/claude-code"),
]


@pytest.fixture(scope="module")
def served(smollm2_tokenizer: Any) -> Iterator[Served]:
    """Random weights with room for the program's first prompt, some 20,000 tokens."""
    model = tiny_engine(smollm2_tokenizer, 65_536).adapter.model
    engine = Engine(model, smollm2_tokenizer, policy=RecoveryPolicy.default())
    with serving(engine, ServerSettings(timeout_s=300)) as served:
        yield served


@pytest.fixture
def recoveries(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[Any]:
    """The model reads `notes.txt` first, and then says what stands there; the replies."""
    stream, made = Thread.stream, []

    def scripted(self: Thread, messages: Any, **options: Any) -> Any:
        tokenizer, last = self.tokenizer, messages[-1]
        arguments = json.dumps({"file_path": str(tmp_path / "notes.txt")})
        text = last.text[-60:]
        if last.role != "tool" and not any(message.role == "tool" for message in messages):
            text = f'<tool_call>\n{{"name": "Read", "arguments": {arguments}}}\n</tool_call>'
        ids = tokenizer.encode(text, add_special_tokens=False)
        options |= {"begin": (*ids, tokenizer.eos_token_id), "max_new_tokens": len(ids) + 4}
        for chunk in stream(self, messages, **options):
            if chunk.reply is not None:
                made.append((self.id, chunk.reply))
            yield chunk

    monkeypatch.setattr(Thread, "stream", scripted)
    return made


def claude(served: Served, folder: Path, *arguments: str) -> dict[str, Any]:
    environment = {
        name: value for name, value in os.environ.items() if not name.lower().endswith("_proxy")
    } | {
        "HOME": str(folder),
        "ANTHROPIC_BASE_URL": served.url,
        "ANTHROPIC_AUTH_TOKEN": "none",
        "ANTHROPIC_MODEL": MODEL,
        "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
    }
    ended = subprocess.run(
        [str(CLAUDE), "-p", *arguments, "--output-format", "json"],
        cwd=folder,
        env=environment,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert ended.returncode == 0, ended.stdout + ended.stderr
    result: dict[str, Any] = json.loads(ended.stdout)
    return result


def test_a_tool_is_called_and_the_conversation_goes_on(
    served: Served, recoveries: list[Any], tmp_path: Path
) -> None:
    (tmp_path / "notes.txt").write_text("The lamp is on shelf 9.")
    first = claude(served, tmp_path, "Where is the lamp? Read notes.txt.")
    assert not first["is_error"]
    assert "The lamp is on shelf 9." in first["result"]
    second = claude(served, tmp_path, "--continue", "And the rug?")
    assert not second["is_error"]
    (_, one), (_, two), (_, three) = recoveries
    assert len({thread for thread, _ in recoveries}) == 1
    for before, after in ((one, two), (two, three)):
        assert after.report.cache_read >= before.report.tokens - 8
        assert after.report.is_exact
    assert second["usage"]["cache_read_input_tokens"] == three.report.cache_read
    # Another conversation begins with the rows of this one's system prompt and tools.
    recoveries.clear()
    assert not claude(served, tmp_path, "Something else: read notes.txt.")["is_error"]
    _, other = recoveries[0]
    assert other.edits == () and other.report.is_exact
    assert other.report.cache_read > other.report.tokens / 2
