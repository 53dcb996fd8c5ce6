"""States that methods share."""

from __future__ import annotations

import pytest

from patchkv_agents.checkpoint.precision import PrecisionPolicy
from patchkv_agents.context import Conversation, parse_messages
from patchkv_agents.profiling.states import SharedStates
from patchkv_agents.recovery import RecoveryPolicy
from tests.engine.models import tiny_engine

PREFIX_CACHE = RecoveryPolicy.named("prefix_cache")


def conversation(result: str, **fields: str) -> Conversation:
    question = {"role": "user", "content": f"{result} What follows from it? " * 12, **fields}
    return Conversation(parse_messages([question, {"role": "user", "content": "Say why. " * 60}]))


@pytest.fixture(scope="module")
def engine(smollm2_tokenizer):
    return tiny_engine(smollm2_tokenizer, 2048)


def test_contexts_of_the_same_tokens_share_their_state(engine):
    """Ids of messages make another context of them, and not another prompt."""
    with SharedStates(engine, answer_tokens=4) as states:
        first = states.exact(conversation("It rains."))
        assert states.exact(conversation("It rains.", id="m1")) is first
        assert states.exact(conversation("It snows.")) is not first


def test_each_precision_is_stored_once_with_rows_and_scores_of_one_prefill(engine):
    context, edited = conversation("It rains."), conversation("It snows.")
    policy = RecoveryPolicy.default()
    with SharedStates(engine, answer_tokens=4) as states:
        exact, mixed = states.exact(context), states.stored(context, PrecisionPolicy())
        assert states.stored(context, PrecisionPolicy()) is mixed
        assert mixed.reply is exact.reply
        assert mixed.store_ms > 0
        prompt = exact.reply.report.tokens
        scores = [s.thread.sequence.checkpoint.scores[: prompt - 32] for s in (exact, mixed)]
        assert scores[1] / scores[1].sum() == pytest.approx(scores[0] / scores[0].sum(), rel=0.3)
        found = {}
        for name, state in (("exact", exact), ("mixed", mixed)):
            thread, reply = states.resume(state.thread, edited, policy, max_new_tokens=1)
            states.release(thread)
            found[name] = set(reply.report.restored_formats)
        assert found["exact"] == {"native"}
        assert found["mixed"] & {"k8v8", "k8v4"}


def test_a_state_serves_again_and_again_and_goes_at_the_end(engine):
    with SharedStates(engine, answer_tokens=4) as states:
        state = states.exact(conversation("It rains."))
        replies = []
        for _ in range(2):
            thread, reply = states.resume(
                state.thread,
                conversation("It snows."),
                PREFIX_CACHE,
                max_new_tokens=3,
            )
            states.release(thread)
            replies.append(reply)
        assert replies[0].token_ids == replies[1].token_ids
        assert replies[0].report.prefix == replies[1].report.prefix > 0
        names = [state.thread.id]
    assert engine.thread(names[0]) is not state.thread
