"""How likely an answer is in the state that a thread has recovered, teacher forced."""

from __future__ import annotations

from collections.abc import Sequence

from patchkv_agents.engine.reply import Reply
from patchkv_agents.engine.thread import Thread


def answer_log_probs(thread: Thread, reply: Reply, token_ids: Sequence[int]) -> list[float]:
    """Log-probability, in nats, of each token of another answer in place of `reply`'s.

    All answers are scored in one state, that of the prompt: what was sampled behind it goes, and
    so does what is scored. Costs one decode step a token, the last one left out.

    Args:
        thread: has just given `reply`, and is live.
        reply: its answer; gives the first token's logits and the length of the prompt.
        token_ids: of the answer to score.
    """
    sequence, prompt_tokens = thread.sequence, reply.report.tokens
    sequence.rewind(prompt_tokens)
    logits, found = reply.first_logits, []
    for index, token in enumerate(token_ids):
        found.append(float(logits.double().log_softmax(dim=-1)[token]))
        if index + 1 < len(token_ids):
            logits = sequence.append(token)
    sequence.rewind(prompt_tokens)
    return found
