"""What comes back from a thread."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

    from patchkv_agents.context import Edit
    from patchkv_agents.engine.sampler import TokenLogprob
    from patchkv_agents.recovery.plan import RecoveryPlan
    from patchkv_agents.recovery.report import RecoveryReport


@dataclass(frozen=True, slots=True, eq=False)
class Reply:
    """What the model answered.

    Attributes:
        text: the answer, without special tokens and stop string.
        token_ids: sampled ids, the end-of-turn token not among them.
        finish_reason: `"stop"` (end of turn or stop string) or `"length"`.
        report: how the context's KV state was obtained.
        plan: the same, token by token.
        version_id: id of the context version that was answered.
        edits: that made this version; none if it had been answered before, as in a retry.
        first_logits: logits of the first output token, `[vocab]`.
        logprobs: of each of `token_ids`, if they were asked for.
    """

    text: str
    token_ids: tuple[int, ...]
    finish_reason: str
    report: RecoveryReport
    plan: RecoveryPlan
    version_id: str
    first_logits: torch.Tensor
    edits: tuple[Edit, ...] = ()
    logprobs: tuple[TokenLogprob, ...] | None = None


@dataclass(frozen=True, slots=True, eq=False)
class StreamChunk:
    """A piece of a streamed answer.

    Attributes:
        text: the piece.
        reply: set on the last one only.
        logprobs: of the tokens since the last piece, if they were asked for. The text of the last
            of them may be held back.
    """

    text: str
    reply: Reply | None = None
    logprobs: tuple[TokenLogprob, ...] = ()
