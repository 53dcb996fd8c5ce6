"""Several Python threads at one engine: right answers, nobody kept out, nobody stuck."""

from __future__ import annotations

import threading
import time

import pytest
import torch

from patchkv_agents.backends.model_lock import ModelLock
from patchkv_agents.backends.transformers import adapter as adapter_module
from patchkv_agents.backends.transformers.adapter import ModelAdapter
from patchkv_agents.backends.transformers.layerwise import decoder_layers, inputs_of, starting_at
from patchkv_agents.ranges import RowSet
from patchkv_agents.recovery import Blocks, RecoveryPolicy, Window

from .models import full_logits, random_ids, tiny_model

PATCH = RecoveryPolicy("patch", Window(16, tail_tokens=16, block_size=32, rule=Blocks(0.05)))
JOIN_S = 60


def run_all(*targets) -> None:
    """Run functions at once, each in a Python thread of its own; raises what one raised."""
    errors = []

    def guarded(target):
        try:
            target()
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=guarded, args=(t,), daemon=True) for t in targets]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(JOIN_S)
        assert not thread.is_alive(), "stuck"
    if errors:
        raise errors[0]


def test_the_lock_goes_round():
    """In the order in which they came; whoever just had it, and wants it again, is last."""
    lock, taken = ModelLock(), []

    def work(name):
        with lock:
            taken.append(name)

    workers = [threading.Thread(target=work, args=(name,), daemon=True) for name in range(5)]
    with lock:
        for name, worker in enumerate(workers):
            worker.start()
            while lock.waiting == name:
                time.sleep(1e-4)
    work("again")
    for worker in workers:
        worker.join(JOIN_S)
    assert taken == [0, 1, 2, 3, 4, "again"]


def test_the_holder_may_take_it_again():
    lock, taken = ModelLock(), []

    def other():
        with lock:
            taken.append("other")

    with lock:
        waiting = threading.Thread(target=other, daemon=True)
        waiting.start()
        with lock:
            time.sleep(0.02)
        time.sleep(0.02)
        taken.append("holder")
    waiting.join(JOIN_S)
    assert taken == ["holder", "other"]


def test_the_lock_is_given_back_with_an_error():
    lock = ModelLock()
    with pytest.raises(ZeroDivisionError), lock:
        raise ZeroDivisionError
    run_all(lambda: lock.__enter__().__exit__(None, None, None))


def test_the_lock_belongs_to_the_model():
    """Each engine used to have a lock of its own: over one model, the layers that one of them
    skipped or watched for a moment were skipped and watched in the other's calls too."""
    model = tiny_model("llama")
    first, second = ModelAdapter(model), ModelAdapter(model)
    ids = random_ids(1, 40)
    every, logits = RowSet.of_range(0, len(ids)), []

    def call():
        logits.append(second.forward_rows(ids, every, second.new_cache(64)))

    with first.lock, starting_at(decoder_layers(model), 2, torch.zeros(1, 40, 48)):
        other = threading.Thread(target=call, daemon=True)
        other.start()
        while not second.lock.waiting and other.is_alive():
            time.sleep(1e-4)
        assert not logits
    other.join(JOIN_S)
    torch.testing.assert_close(logits[0], full_logits(model, ids))


def test_a_programs_own_call_of_the_model_is_left_alone():
    """It knows of no lock, and must not run with another call's layers."""
    model = tiny_model("llama")
    ids = random_ids(1, 40)
    expected, logits = full_logits(model, ids), []
    layers = decoder_layers(model)
    with inputs_of(layers[1]) as collected, starting_at(layers, 2, torch.zeros(1, 40, 48)):
        run_all(lambda: logits.append(full_logits(model, ids)))
        assert not collected
    torch.testing.assert_close(logits[0], expected)


def conversation(name: int, step: int) -> list[dict[str, str]]:
    notes = f"The ferry of line {name} leaves from pier {step * 7 + name}. " * (4 + name % 3)
    return [
        {"role": "system", "content": f"You are agent {name}."},
        {"role": "user", "content": notes + "The museum opens at nine. " * 6},
        {"role": "user", "content": "Which pier?"},
    ]


def episode(thread, name: int) -> list[tuple[int, ...]]:
    """Edits of the same message, suspended in between, recovered approximately and exactly."""
    answers = []
    for step in range(3):
        policy = PATCH if step % 2 else None
        reply = thread.generate(
            conversation(name, step), policy=policy, max_new_tokens=6, temperature=1.0, seed=step
        )
        answers.append(reply.token_ids)
        thread.suspend()
    return answers


def test_eight_python_threads_get_the_answers_of_one(engine, monkeypatch):
    """Each with four threads of the engine, in small chunks, so that all of it interleaves."""
    monkeypatch.setattr(adapter_module, "MAX_ROWS", 32)
    names = range(8)
    alone = {name: episode(engine.thread(f"alone-{name}"), name) for name in names}
    together = {}

    def work(name):
        for part in range(4):
            together[name, part] = episode(engine.thread(f"{name}-{part}"), name)

    run_all(*(lambda name=name: work(name) for name in names))
    assert together == {(name, part): alone[name] for name in names for part in range(4)}


def test_decoding_goes_on_during_a_long_prefill(engine, monkeypatch):
    """Between two chunks of the prefill, the thread that decodes gets its turn."""
    monkeypatch.setattr(adapter_module, "MAX_ROWS", 8)
    events: list[str] = []
    forward = engine.adapter.forward_chunk

    def recorded(token_ids, active, cache):
        logits = forward(token_ids, active, cache)
        events.append("step" if len(active.rows) == 1 else "chunk")
        return logits

    monkeypatch.setattr(engine.adapter, "forward_chunk", recorded)
    stream = engine.thread("decoding").stream(conversation(0, 0), max_new_tokens=400)
    next(stream)
    events.clear()
    done = threading.Event()

    def prefill():
        engine.thread("prefilling").generate(conversation(5, 1), max_new_tokens=1)
        done.set()

    def decode():
        for _ in stream:
            if done.is_set():
                break
        stream.close()

    run_all(prefill, decode)
    chunks = [at for at, event in enumerate(events) if event == "chunk"]
    assert len(chunks) > 8
    between = [second - first > 1 for first, second in zip(chunks, chunks[1:], strict=False)]
    assert sum(between) > len(between) / 5  # beside other programs, not every time


def test_a_stream_that_is_closed_lets_the_others_go_on(engine):
    """One agent gives up in the middle of its answer while others wait for their turns."""
    expected = episode(engine.thread("undisturbed"), 3)
    answers = []

    def give_up():
        for number in range(5):
            stream = engine.thread(f"quitter-{number}").stream(
                conversation(1, number), max_new_tokens=50
            )
            next(stream)
            stream.close()

    run_all(give_up, lambda: answers.append(episode(engine.thread("patient"), 3)))
    assert answers == [expected]
    # And the thread whose stream was closed answers again.
    assert engine.thread("quitter-1").generate(conversation(1, 1), max_new_tokens=3).text
