"""Other answers scored in the state behind a prompt, against plain calls of the model."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from patchkv_agents.engine import Engine
from patchkv_agents.engine.scoring import answer_log_probs
from patchkv_agents.recovery import RecoveryPolicy, Window

from .models import full_logits, sequence_of, tiny_engine, tiny_model
from .models import random_ids as ids

MESSAGES = [
    {"role": "system", "content": "Answer in a word."},
    {"role": "user", "content": "Which river is this? " + "It is long. " * 30},
]


@pytest.fixture(scope="module")
def engine(smollm2_tokenizer) -> Engine:
    return tiny_engine(smollm2_tokenizer, 2048)


def expected(engine: Engine, prompt: np.ndarray, answer: list[int]) -> list[float]:
    """Log-probability of each token by a full prefill of all that precedes it."""
    found = []
    for index, token in enumerate(answer):
        logits = full_logits(engine.adapter.model, np.append(prompt, answer[:index]).astype(int))
        found.append(float(logits.double().log_softmax(-1)[token]))
    return found


def test_answers_are_scored_in_the_same_state_whatever_came_before(engine):
    thread = engine.thread("scored")
    reply = thread.generate(MESSAGES, max_new_tokens=5)
    prompt = thread.sequence.token_ids[: reply.report.tokens].copy()
    for answer in ([7, 300, 12, 9], [11], [300, 7], [7, 300, 12, 9]):
        found = answer_log_probs(thread, reply, answer)
        assert found == pytest.approx(expected(engine, prompt, answer), abs=1e-4)
    assert np.array_equal(thread.sequence.token_ids, prompt)


def test_an_approximate_state_is_scored_as_it_is(engine):
    """Restored rows are not computed anew for the scoring, or the score would be the exact one."""
    thread = engine.thread("approximate")
    thread.generate([*MESSAGES, {"role": "user", "content": "Well? " * 200}], max_new_tokens=1)
    thread.suspend()
    edited = [MESSAGES[0], {"role": "user", "content": "Which lake? " * 9}]
    edited.append({"role": "user", "content": "Well? " * 200})
    policy = RecoveryPolicy("rough", Window(0, tail_tokens=1, block_size=32))
    reply = thread.generate(edited, policy=policy, max_new_tokens=3)
    assert reply.report.restored > 100
    prompt = thread.sequence.token_ids[: reply.report.tokens].copy()
    answer = [7, 300, 12]
    found = answer_log_probs(thread, reply, answer)
    exact = expected(engine, prompt, answer)
    assert max(abs(a - b) for a, b in zip(found, exact, strict=True)) > 1e-3
    assert found == answer_log_probs(thread, reply, answer)


def test_a_rewound_sequence_goes_on_as_if_nothing_had_been_appended():
    model = tiny_model("llama")
    sequence = sequence_of(model)
    prompt = ids(1, 70)
    sequence.resume(prompt, RecoveryPolicy.exact(), room=8)
    for token in (5, 6, 7):
        sequence.append(token)
    sequence.rewind(70)
    logits = sequence.append(9)
    torch.testing.assert_close(
        logits, full_logits(model, np.append(prompt, 9)), atol=1e-4, rtol=1e-4
    )
    sequence.suspend()
    assert len(sequence.checkpoint) == 71 and sequence.checkpoint.stored.all()


def test_only_a_live_sequence_is_rewound():
    sequence = sequence_of(tiny_model("llama"))
    with pytest.raises(RuntimeError, match="live"):
        sequence.rewind(1)
    sequence.resume(ids(1, 40), RecoveryPolicy.exact())
    with pytest.raises(RuntimeError, match="live"):
        sequence.rewind(41)
