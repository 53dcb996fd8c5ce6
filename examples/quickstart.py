"""An agent's tool result goes stale and is replaced; the KV cache is recovered, not rebuilt.

Run it with the embedded model: `python examples/quickstart.py`, or name another one.
"""

import sys

from patchkv_agents import Engine, RecoveryPolicy

PASSAGE = (
    "The harbour office keeps a log of every vessel that ties up at the quay, with the hour of "
    "arrival, the cargo and the name of the pilot. Entry {0}: the barge {0} brought gravel. "
)

engine = Engine.from_pretrained(
    sys.argv[1] if len(sys.argv) > 1 else "smollm2",
    policy=RecoveryPolicy.default(),  # an approximation, chosen on purpose; without it: exact
)
thread = engine.thread("episode-1")

messages = [
    {"role": "system", "content": "You answer questions from the notes you are given."},
    {"role": "user", "content": "What is the password of the day?"},
    {"role": "tool", "content": "The password of the day is 'heron'."},
    {"role": "tool", "content": "".join(PASSAGE.format(number) for number in range(30))},
    {"role": "user", "content": "So what is the password of the day? Answer with one word."},
]
reply = thread.generate(messages, max_new_tokens=12)  # first call: exact prefill
print("before:", reply.text)

thread.suspend()  # while a tool runs: the KV rows go to CPU memory

messages[2]["content"] = "The password of the day is 'walnut'."  # an edit near the beginning
reply = thread.generate(messages, max_new_tokens=12)  # recovered, not prefilled again
print("after: ", reply.text)

report = reply.report
print(
    f"{report.tokens} tokens: {report.prefix} exact, "
    f"{report.computed} computed, "
    f"{report.restored} restored; first token after {report.resume_ttft_ms:.0f} ms; "
    f"exact: {report.is_exact}"
)
