"""Shadow checks: they find what recovery got wrong, and whoever asks never waits for them."""

from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Callable

import numpy as np
import pytest
import torch

from patchkv_agents.context import ThreadKey
from patchkv_agents.divergence import first_token_kl
from patchkv_agents.engine import Engine
from patchkv_agents.engine import shadow as module
from patchkv_agents.engine.shadow import Shadow, ShadowChecks, ShadowResult
from patchkv_agents.errors import InputError, PatchKVError
from patchkv_agents.recovery import DirectReuse, RecoveryPolicy, Window
from tests.engine.models import tiny_engine

THREAD = ThreadKey("t", "")
IDS = np.arange(300)
EXACT = torch.tensor([0.0, 1.0, 2.0])
OTHER = torch.tensor([2.0, 1.0, 0.0])


def offered(shadow: Shadow, *logits: torch.Tensor) -> None:
    for each in logits:
        shadow.offer(THREAD, "patchkv", IDS, each)


def test_a_divergence_is_found_and_told():
    told: list[ShadowResult] = []
    shadow = Shadow(ShadowChecks(1.0, report=told.append), lambda ids, give_way: EXACT)
    assert shadow.summary().first_token_kl_max is None
    for logits in (EXACT, OTHER):
        offered(shadow, logits)
        shadow.flush()
    found = shadow.summary()
    kl = first_token_kl(EXACT, OTHER)
    assert (found.checks, found.agreed, found.dropped, found.failed) == (2, 1, 0, 0)
    assert found.first_token_kl_max == kl and found.first_token_kl_median == kl / 2
    assert [result.top1_agree for result in told] == [True, False]
    assert told[1].first_token_kl == kl and told[1].thread == THREAD and told[1].tokens == 300
    shadow.close()


def test_the_share_is_that_of_the_sample_and_the_seed_repeats_it():
    def sample(seed: int) -> list[int]:
        checked: list[int] = []
        shadow = Shadow(
            ShadowChecks(0.25, seed=seed), lambda ids, give_way: checked.append(len(ids)) or EXACT
        )
        for number in range(200):
            shadow.offer(THREAD, "patchkv", IDS[: number + 1], EXACT)
            shadow.flush()
        return checked

    first = sample(1)
    assert 30 <= len(first) <= 70 and sample(1) == first != sample(2)
    for share in (0.0, 1.1, float("nan")):
        with pytest.raises(InputError):
            ShadowChecks(share)


def test_one_waits_and_more_are_dropped_without_anybody_waiting():
    go, waited = threading.Event(), []

    def check(ids, give_way):
        waited.append(go.wait(30))
        return EXACT

    shadow = Shadow(ShadowChecks(1.0), check)
    offered(shadow, *[OTHER] * 5)
    assert waited == []  # all were offered while the first check goes on
    assert shadow.summary().dropped == 3
    go.set()
    shadow.flush()
    assert shadow.summary().checks == 2


def test_errors_reach_nobody_and_are_counted(caplog):
    def broken(result: ShadowResult) -> None:
        raise RuntimeError("the reporter broke")

    def prefill(ids, give_way):
        if len(ids) == 1:
            raise PatchKVError("the model broke")
        return torch.full((3,), float("nan")) if len(ids) == 2 else EXACT

    shadow = Shadow(ShadowChecks(1.0, report=broken), prefill)
    for tokens in (1, 2, 3):
        shadow.offer(THREAD, "patchkv", IDS[:tokens], EXACT)
        shadow.flush()
    assert (shadow.summary().checks, shadow.summary().failed) == (1, 3)
    assert "the model broke" in caplog.text and "the reporter broke" in caplog.text


def test_a_check_waits_while_somebody_is_answered_but_not_for_ever(monkeypatch):
    passed = threading.Event()

    def prefill(ids, give_way):
        give_way()
        passed.set()
        return EXACT

    shadow = Shadow(ShadowChecks(1.0), prefill)
    with shadow.answering():
        offered(shadow, EXACT)
        assert not passed.wait(0.1)
    assert passed.wait(30)
    shadow.flush()
    passed.clear()
    monkeypatch.setattr(module, "PATIENCE_S", 0.05)
    with shadow.answering():
        offered(shadow, EXACT)
        assert passed.wait(30)


def test_forgetting_gives_up_what_is_checked_and_what_waits():
    """A waiting check held the ids of a prompt from which a secret was to be removed."""
    begun, going_on = threading.Event(), threading.Event()

    def exact(ids: np.ndarray, give_way: Callable[[], None]) -> torch.Tensor:
        begun.set()
        going_on.wait(10)
        give_way()
        return EXACT

    shadow = Shadow(ShadowChecks(1.0), exact)
    offered(shadow, EXACT)
    begun.wait(10)
    offered(shadow, EXACT)
    shadow.forget()
    going_on.set()
    shadow.flush()
    assert (shadow.summary().checks, shadow.summary().dropped) == (0, 2)
    offered(shadow, EXACT)
    shadow.flush()
    assert shadow.summary().checks == 1
    shadow.close()


def test_forgetting_reaches_a_check_between_the_queue_and_its_first_pause(monkeypatch):
    """What was forgotten there was prefilled all the same, and was counted twice."""
    prefilled: list[int] = []
    shadow = Shadow(ShadowChecks(1.0), lambda ids, give_way: prefilled.append(len(ids)) or EXACT)
    check = shadow._check

    def forgetting(*entry):
        shadow.forget()
        return check(*entry)

    monkeypatch.setattr(shadow, "_check", forgetting)
    offered(shadow, EXACT)
    shadow.flush()
    assert prefilled == []
    assert (shadow.summary().checks, shadow.summary().dropped) == (0, 1)


def test_forgetting_reaches_a_check_past_its_last_pause():
    told: list[ShadowResult] = []
    shadow = Shadow(ShadowChecks(1.0, report=told.append), lambda ids, give_way: forget())

    def forget() -> torch.Tensor:
        shadow.forget()
        return EXACT

    offered(shadow, EXACT)
    shadow.flush()
    assert (shadow.summary().checks, shadow.summary().dropped, told) == (0, 1, [])


def test_a_check_that_was_made_is_not_dropped_while_it_is_told():
    shadow = Shadow(
        ShadowChecks(1.0, report=lambda result: shadow.forget()), lambda ids, give_way: EXACT
    )
    offered(shadow, EXACT)
    shadow.flush()
    assert (shadow.summary().checks, shadow.summary().dropped) == (1, 0)


def test_closing_gives_up_what_waits():
    def prefill(ids, give_way):
        while True:
            give_way()

    shadow = Shadow(ShadowChecks(1.0), prefill)
    with shadow.answering():
        offered(shadow, EXACT, EXACT)
        shadow.close()
    offered(shadow, EXACT)
    shadow.flush()
    assert shadow.summary().checks == shadow.summary().failed == 0


def messages(weather: str):
    return [
        {"role": "user", "content": f"It {weather}. What follows?"},
        {"role": "user", "content": "Say why that is, and what else you know. " * 30},
    ]


@pytest.fixture(scope="module")
def engine(smollm2_tokenizer) -> Engine:
    plain = tiny_engine(smollm2_tokenizer, 1024)
    return Engine(plain.adapter.model, smollm2_tokenizer, shadow=ShadowChecks(1.0))


def test_an_engine_checks_its_approximate_answers(engine):
    """The planted divergence: nothing behind the edit is repaired. The exact answer is known."""
    exact = engine.thread("exact").generate(messages("snows"), max_new_tokens=1)
    thread = engine.thread("edited")
    thread.generate(messages("rains"), max_new_tokens=1)
    thread.suspend()
    engine.shadow.flush()
    assert engine.shadow.summary().checks == 0  # nothing was approximate yet
    policy = RecoveryPolicy("none", DirectReuse())
    reply = thread.generate(messages("snows"), max_new_tokens=4, policy=policy)
    engine.shadow.flush()
    found = engine.shadow.summary()
    expected = first_token_kl(exact.first_logits, reply.first_logits)
    assert found.checks == 1 and expected > 1e-3
    assert found.first_token_kl_max == pytest.approx(expected, rel=1e-3)


def test_a_closed_stream_is_checked_once_it_is_complete(engine):
    before = engine.shadow.summary().checks
    thread = engine.thread("stream")
    thread.generate(messages("rains"), max_new_tokens=1)
    thread.suspend()
    policy = RecoveryPolicy("short", Window(32, tail_tokens=32, block_size=32))
    stream = thread.stream(messages("snows"), max_new_tokens=8, policy=policy)
    next(stream)
    stream.close()  # the client went away: there is no answer to check
    engine.shadow.flush()
    assert engine.shadow.summary().checks == before
    for chunk in thread.stream(messages("hails"), max_new_tokens=2, policy=policy):
        last = chunk
    engine.shadow.flush()
    assert last.reply is not None and engine.shadow.summary().checks == before + 1


_ENDING = """
import threading
import numpy as np, torch
from patchkv_agents.context import ThreadKey
from patchkv_agents.engine.shadow import Shadow, ShadowChecks

started = threading.Event()

def logits(ids, give_way):
    started.set()
    for _ in range(6_000):
        give_way()
        threading.Event().wait(0.1)

shadow = Shadow(ShadowChecks(1.0), logits)
for _ in range(2):
    shadow.offer(ThreadKey("t", ""), "patchkv", np.arange(3), torch.zeros(3))
started.wait()
"""


def test_the_end_of_the_process_does_not_wait_for_checks():
    ended = subprocess.run([sys.executable, "-c", _ENDING], timeout=60, capture_output=True)
    assert (ended.returncode, ended.stderr) == (0, b"")
