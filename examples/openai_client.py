"""An agent program's requests, through the official `openai` client: an edit costs no prefill.

Runs against a server that you started:

    patchkv serve smollm2 --policy default
    python examples/openai_client.py http://127.0.0.1:8080/v1

or, without an address, against one that it starts itself. Needs `pip install openai` and the extra
`server`.
"""

from __future__ import annotations

import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from openai import OpenAI

PORT = 8089

MANUAL = " ".join(
    f"Section {number}: valve {number} opens at {number + 3} bar and is checked every "
    f"{number % 5 + 2} weeks; its seal is of type {'ABC'[number % 3]}."
    for number in range(1, 40)
)


def conversation(pressure: str) -> list[dict[str, Any]]:
    """What an agent shows the model; the reading of the gauge is taken anew for each request."""
    return [
        {"role": "system", "content": "You help a plant operator. Be brief."},
        {"role": "user", "content": f"Pressure now: {pressure}."},
        {"role": "user", "content": f"From the manual: {MANUAL}"},
        {"role": "user", "content": "At which pressure does valve 7 open?"},
    ]


def ask(client: OpenAI, model: str, messages: list[dict[str, Any]]) -> dict[str, Any]:
    """Stream one answer, and print how the context's state was obtained; returns that."""
    answer = client.chat.completions.create(
        model=model,
        messages=messages,  # type: ignore[arg-type]
        max_tokens=24,
        temperature=0,
        stream=True,
        stream_options={"include_usage": True},
    )
    for chunk in answer:
        if chunk.choices and chunk.choices[0].delta.content:
            print(chunk.choices[0].delta.content, end="", flush=True)
    recovery: dict[str, Any] = chunk.recovery  # type: ignore[attr-defined]
    print(
        f"\n  {recovery['tokens']} tokens: {recovery['cache_read']} as they were, "
        f"{recovery['restored']} restored, the rest computed; first token after "
        f"{recovery['resume_ttft_ms']:.0f} ms (policy {recovery['policy']})"
    )
    for edit in recovery["edits"]:
        print(f"  edit found: {edit['kind']}, message {edit['new_indices']}")
    print()
    return recovery


@contextmanager
def server() -> Iterator[str]:
    """The address of the server: the one given, or one of its own."""
    if len(sys.argv) > 1:
        yield sys.argv[1]
        return
    command = [sys.executable, "-m", "patchkv_agents.cli.main", "serve", "smollm2"]
    process = subprocess.Popen([*command, "--policy", "default", "--port", str(PORT)])
    try:
        while process.poll() is None:
            try:
                urllib.request.urlopen(f"http://127.0.0.1:{PORT}/health", timeout=1)
                break
            except OSError:
                time.sleep(0.2)
        yield f"http://127.0.0.1:{PORT}/v1"
    finally:
        process.terminate()
        process.wait()


def main() -> int:
    """Two requests whose contexts differ in the middle; 0 if the second one was recovered."""
    with server() as address:
        client = OpenAI(base_url=address, api_key="none")
        model = client.models.list().data[0].id
        ask(client, model, conversation("5.2 bar"))
        recovery = ask(client, model, conversation("5.9 bar, rising"))
    return 0 if recovery["restored"] and recovery["edits"] else 1


if __name__ == "__main__":
    sys.exit(main())
