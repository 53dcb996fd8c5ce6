"""Random walks over everything that a caller may do: what is called exact is exact, always.

`PATCHKV_WALK_STEPS=3000 pytest tests/engine/test_random_walk.py` walks further.
"""

from __future__ import annotations

import faulthandler
import os
import random
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager, nullcontext

import numpy as np
import pytest
import torch

from patchkv_agents.checkpoint import Checkpoint
from patchkv_agents.checkpoint.precision import PrecisionPolicy
from patchkv_agents.checkpoint.stores import MemoryStore
from patchkv_agents.checkpoint.stores.base import CheckpointLoad
from patchkv_agents.context import Edit, EditKind, MemoryHistoryStore
from patchkv_agents.engine import Engine
from patchkv_agents.errors import CheckpointError
from patchkv_agents.recovery import RecoveryPolicy
from patchkv_agents.recovery.restore import Restoration

from .models import full_rows, tiny_engine
from .test_sharing import run_all
from .test_thread import PATCH

STEPS = int(os.environ.get("PATCHKV_WALK_STEPS", "60"))
SEEDS = [int(seed) for seed in os.environ.get("PATCHKV_WALK_SEEDS", "4").split(",")]
STUCK_S = 60
TOLERANCE = 2e-4
POLICIES = (None, PATCH, RecoveryPolicy.default())
PARTS = ("render", "wait", "history", "fetch", "planning", "restore", "recompute", "sampling")
WORDS = "ferry pier museum opens leaves nine four harbor ticket island north gate".split()


@pytest.fixture(scope="module")
def plain(smollm2_tokenizer):
    return tiny_engine(smollm2_tokenizer, max_tokens=900)


@pytest.fixture(autouse=True)
def deadline():
    """Prints where everybody is, and ends, if something is stuck."""
    faulthandler.dump_traceback_later(STUCK_S + STEPS, exit=True)
    yield
    faulthandler.cancel_dump_traceback_later()


class Fault(Exception):
    """The failure that a walk causes."""


class FlakyStore(MemoryStore):
    """A store of which some calls fail at times, as do rows on their way."""

    def __init__(self) -> None:
        super().__init__()
        self.failing: set[str] = set()

    def _try(self, call: str) -> None:
        if call in self.failing:
            raise CheckpointError(f"the store is away ({call})")

    def save(self, key, checkpoint):
        self._try("save")
        super().save(key, checkpoint)

    def open(self, key):
        self._try("open")
        checkpoint = self.load(key)
        if checkpoint is None:
            return None
        arrival: Future[None] = Future()
        if "arrive" in self.failing:
            arrival.set_exception(CheckpointError("a part is missing"))
        else:
            arrival.set_result(None)
        return CheckpointLoad(checkpoint, [(1, arrival)], deadline=float("inf"))

    def versions(self, *scope):
        self._try("versions")
        return super().versions(*scope)

    def delete(self, key):
        self._try("delete")
        super().delete(key)

    def checkpoints(self) -> list[Checkpoint]:
        return list(self._checkpoints.values())


class Reference:
    """Full prefills."""

    def __init__(self, plain: Engine) -> None:
        self._engine = plain
        self._rows: dict[bytes, tuple[torch.Tensor, torch.Tensor]] = {}

    def rows(self, token_ids) -> tuple[torch.Tensor, torch.Tensor]:
        name = token_ids.tobytes()
        if name not in self._rows:
            if len(self._rows) > 100:
                self._rows.clear()
            self._rows[name] = full_rows(self._engine.adapter.model, token_ids)
        return self._rows[name]

    def logits(self, token_ids) -> torch.Tensor:
        return self._engine.runtime.exact_logits(token_ids, lambda: None)

    def check(self, checkpoint: Checkpoint, cache=None) -> None:
        """Every row that is called exact is the model's own."""
        present = np.ones(len(checkpoint), dtype=bool) if cache else checkpoint.stored
        exact = np.flatnonzero((checkpoint.origins == 0) & present)
        if not len(exact):
            return
        keys, values = self.rows(checkpoint.token_ids)
        caches = [cache] if cache else []
        if checkpoint.stored.any():
            read = self._engine.adapter.new_cache(len(checkpoint))
            source = np.where(checkpoint.stored, np.arange(len(checkpoint)), -1)
            restoration = Restoration(
                checkpoint.stored_at(source), read.shards, self._engine.rope, None
            )
            for layer in range(self._engine.adapter.layers):
                restoration.ready(layer)
            caches.append(read)
        for each in caches:
            held = exact if each is cache else exact[checkpoint.stored[exact]]
            for layer in range(self._engine.adapter.layers):
                got_keys, got_values = each.layer(layer)
                close(got_keys[:, held], keys[layer][:, held])
                close(got_values[:, held], values[layer][:, held])


def close(one: torch.Tensor, other: torch.Tensor) -> None:
    torch.testing.assert_close(one, other, atol=TOLERANCE, rtol=TOLERANCE)


class Walk:
    """One walk. Everything random comes from its seed."""

    def __init__(self, plain: Engine, seed: int) -> None:
        self.random = random.Random(seed)
        self.plain = plain
        self.reference = Reference(plain)
        self.store = FlakyStore()
        self.history = MemoryHistoryStore()
        self.prompt: dict[str, np.ndarray] = {}
        self.engines = [self.engine(True), self.engine(False)]
        self.contexts: dict[tuple[int, str], list[dict]] = {}
        self.streams: list[tuple[tuple[int, str], Iterator]] = []
        self.names = 0
        self.log: list[str] = []

    def engine(self, stored: bool) -> Engine:
        options = {"store": self.store, "history": self.history} if stored else {}
        made = Engine(
            self.plain.adapter.model,
            self.plain.tokenizer,
            memory_budget_bytes=self.random.choice([10**10, 10**7, 2 * 10**6, 1]),
            max_threads=self.random.choice([2, 5, 100]),
            packing=self.random.choice(["under_pressure", "now"]),
            policy=PATCH,
            **options,
        )
        made.runtime.fingerprint = self.plain.fingerprint
        return made

    # Contexts

    def text(self) -> str:
        words = self.random.choices(WORDS, k=self.random.choice([3, 10, 60]))
        return " ".join(words).capitalize() + "."

    def new(self) -> tuple[int, str]:
        self.names += 1
        key = self.random.randrange(2), f"t{self.names}"
        self.contexts[key] = [
            {"role": "system", "content": "You answer from the notes."},
            {"role": "user", "content": self.text()},
        ]
        return key

    def pick(self) -> tuple[int, str]:
        busy = {key for key, _ in self.streams}
        free = [key for key in self.contexts if key not in busy]
        if len(free) < 3 or (len(self.contexts) < 8 and self.random.random() < 0.05):
            return self.new()
        return self.random.choice(free)

    def thread(self, key):
        return self.engines[key[0]].thread(key[1])

    def changed(self, key) -> tuple[list[dict], list[Edit]]:
        messages = [dict(message) for message in self.contexts[key]]
        head = self.thread(key).history.head
        kind = self.random.choice(["append", "append", "edit", "edit", "forget", "delete", "same"])
        index = self.random.randrange(1, len(messages))
        if len(messages) > 9:
            del messages[1:4]
        elif kind == "append":
            messages.append({"role": "assistant", "content": self.text()})
            messages.append({"role": "user", "content": self.text()})
        elif kind == "edit":
            messages[index]["content"] = self.text()
        elif kind == "delete" and len(messages) > 3:
            del messages[index]
        elif kind == "forget" and head and index < len(head.messages):
            messages[index]["content"] = self.text()
            edit = Edit.declare(EditKind.REDACT, old=(index,), new=(index,), forget=True)
            return messages, [edit]
        return messages, []

    # Steps

    def step(self) -> None:
        act = self.random.choices(
            [
                self.answer,
                self.suspend,
                self.fork,
                self.resize,
                self.restart,
                self.break_store,
                self.open_stream,
                self.close_stream,
                self.drop,
                self.flush,
            ],
            [40, 12, 4, 6, 3, 6, 4, 4, 2, 6],
        )[0]
        self.log.append(act.__name__)
        act()

    def answer(self) -> None:
        key = self.pick()
        messages, edits = self.changed(key)
        thread, policy = self.thread(key), self.random.choice(POLICIES)
        options = {"edits": edits, "policy": policy, "max_new_tokens": self.random.randrange(1, 4)}
        failure = self.random.random() < 0.15
        self.log.append(f"  {key} {len(messages)} {[e.kind for e in edits]} {failure=}")
        try:
            with self.failing_model() if failure else nullcontext():
                reply = thread.generate(messages, **options)
        except Fault:
            self.check(key)
            return
        self.contexts[key] = messages
        if self.random.random() < 0.5:
            self.contexts[key] = [
                *messages,
                {"role": "assistant", "content": reply.text},
                {"role": "user", "content": self.text()},
            ]
        self.check_reply(thread, reply, edits)
        self.check(key)

    def check_reply(self, thread, reply, edits) -> None:
        report = reply.report
        parts = [getattr(report, f"{part}_ms") for part in PARTS]
        assert sum(parts) == pytest.approx(report.ttft_ms) and min(parts) >= 0
        token_ids = thread.sequence.token_ids[: report.tokens]
        if len(token_ids) == report.tokens:
            origins = thread.sequence.checkpoint.origins[: report.tokens]
            if thread.sequence.is_live:
                assert report.is_exact == (not origins.any())
            if report.is_exact:
                close(reply.first_logits, self.reference.logits(token_ids))
        if any(edit.forget for edit in edits):
            assert report.restored == 0 or report.resumed_from is not None

    def suspend(self) -> None:
        key = self.pick()
        self.thread(key).suspend(self.random.choice([None, "now", "under_pressure"]))
        if self.random.random() < 0.5:
            self.check(key)

    def fork(self) -> None:
        if len(self.contexts) > 12:
            self.drop()
        key = self.pick()
        self.names += 1
        copy = key[0], f"t{self.names}"
        self.thread(key).fork(copy[1])
        self.contexts[copy] = self.contexts[key]
        self.check(copy)

    def resize(self) -> None:
        engine = self.random.choice(self.engines)
        engine.pool.memory_budget_bytes = self.random.choice(
            [10**10, 10**7, 3 * 10**6, 10**6, 10**5, 1]
        )
        if self.random.random() < 0.5:
            engine.pool.fit()

    def restart(self) -> None:
        """A new process, perhaps while the old one is still storing."""
        for held, stream in [*self.streams]:
            if held[0] == 0:
                stream.close()
                self.streams.remove((held, stream))
        if self.random.random() < 0.7:
            self.engines[0].flush()
        self.engines[0] = self.engine(True)

    def break_store(self) -> None:
        calls = ["save", "open", "versions", "delete", "arrive"]
        self.store.failing = set(self.random.sample(calls, self.random.choice([0, 0, 1, 2])))

    def open_stream(self) -> None:
        key = self.pick()
        messages, edits = self.changed(key)
        stream = self.thread(key).stream(
            messages, edits=edits, policy=self.random.choice(POLICIES), max_new_tokens=6
        )
        if self.random.random() < 0.9:
            next(stream)
            self.contexts[key] = messages
            self.streams.append((key, stream))

    def close_stream(self) -> None:
        if self.streams:
            key, stream = self.streams.pop(self.random.randrange(len(self.streams)))
            if self.random.random() < 0.5:
                for _ in stream:
                    pass
            else:
                stream.close()
            self.check(key)

    def drop(self) -> None:
        key = self.pick()
        self.engines[key[0]].drop(key[1], delete=False)
        del self.contexts[key]

    def flush(self) -> None:
        for engine in self.engines:
            engine.flush()
        self.check_budgets()
        for checkpoint in self.store.checkpoints():
            self.reference.check(checkpoint)

    @contextmanager
    def failing_model(self) -> Iterator[None]:
        """The model fails after some calls of a layer."""
        layer = self.random.choice(list(self.plain.adapter.model.model.layers))
        left = self.random.choice([0, 0, 1, 2])

        me = threading.get_ident()

        def fail(*_):
            nonlocal left
            if threading.get_ident() == me:
                left -= 1
                if left < 0:
                    raise Fault

        handle = layer.register_forward_pre_hook(fail)
        try:
            yield
        finally:
            handle.remove()

    # Checks

    def check(self, key) -> None:
        if any(held == key for held, _ in self.streams):
            return
        sequence = self.thread(key).sequence
        self.reference.check(sequence.checkpoint, sequence.live_cache)
        for version in list(sequence.versions):
            checkpoint = sequence.versions.get(version)
            if checkpoint is not None:
                self.reference.check(checkpoint)

    def check_budgets(self) -> None:
        for number, engine in enumerate(self.engines):
            if any(key[0] == number for key, _ in self.streams):
                continue
            engine.pool.fit()
            engine.flush()
            live, stored = engine.pool.memory()
            budget = engine.pool.memory_budget_bytes
            if live + stored > budget:  # the version used last always stays
                versions = [
                    thread.sequence.versions.get(version)
                    for thread in engine.pool.threads()
                    for version in thread.sequence.versions
                ]
                payloads = {e.payload for v in versions if v for e in v.extents}
                tokens = max((len(v) for v in versions if v), default=0)
                assert not live
                assert sum(p.rows for p in payloads) <= tokens, (stored, budget, len(versions))


@pytest.mark.parametrize("seed", SEEDS)
def test_what_is_called_exact_is_exact_whatever_happens(plain, seed):
    walk = Walk(plain, seed)
    for number in range(STEPS):
        try:
            walk.step()
        except BaseException as error:
            error.add_note(f"seed {seed}, step {number}: " + "\n".join(walk.log[-40:]))
            raise


def test_walks_at_once(plain):
    """Several users of two engines over one model, each with threads of its own."""
    walk = Walk(plain, 3)
    walk.engines = [walk.engine(True), walk.engine(False)]

    def user(number: int) -> Callable[[], None]:
        def steps() -> None:
            own = Walk(plain, 100 + number)
            own.engines = walk.engines
            own.names = 1000 * number
            for _ in range(STEPS // 4):
                own.random.choices(
                    [own.answer, own.suspend, own.resize, own.open_stream, own.close_stream],
                    [10, 3, 2, 1, 2],
                )[0]()
            for _, stream in own.streams:
                stream.close()

        return steps

    run_all(*(user(number) for number in range(1, 4)))


class Worlds:
    """The same walk in worlds that differ in the text of their secrets only.

    What is answered once a secret is forgotten is the same in all of them.
    """

    SECRETS = ("purple zebra", "golden onion")

    def __init__(self, plain: Engine, seed: int) -> None:
        self.random = random.Random(seed)
        self.plain = plain
        self.stores = [FlakyStore() for _ in self.SECRETS]
        self.histories = [MemoryHistoryStore() for _ in self.SECRETS]
        self.start()
        self.contexts: dict[str, list[str]] = {}  # texts by thread; `{}` is the secret
        self.compared = 0
        self.log: list[str] = []

    def start(self) -> None:
        budget = self.random.choice([10**10, 10**7, 2 * 10**6, 10**6, 1])
        self.engines = []
        for store, history in zip(self.stores, self.histories, strict=True):
            made = Engine(
                self.plain.adapter.model,
                self.plain.tokenizer,
                store=store,
                history=history,
                storage=PrecisionPolicy.lossless(),
                memory_budget_bytes=budget,
                policy=PATCH,
            )
            made.runtime.fingerprint = self.plain.fingerprint
            self.engines.append(made)

    def text(self) -> str:
        return " ".join(self.random.choices(WORDS, k=self.random.choice([5, 60, 120])))

    def step(self) -> None:
        act = self.random.choices(
            [self.answer, self.suspend, self.fork, self.restart, self.resize, self.break_store],
            [40, 12, 6, 4, 4, 6],
        )[0]
        self.log.append(act.__name__)
        act()
        for engine in self.engines:
            engine.flush()

    def answer(self) -> None:
        if len(self.contexts) < 2 or self.random.random() < 0.1:
            texts = ["You answer.", f"The word is {{}}. {self.text()}", self.text(), self.text()]
            self.contexts[f"t{len(self.contexts)}"] = texts
        name = self.random.choice([*self.contexts])
        texts = [*self.contexts[name]]
        edits, kind = [], self.random.choice(["append", "edit", "edit", "secret", "forget"])
        secret = next((i for i, text in enumerate(texts) if "{}" in text), None)
        index = self.random.randrange(1, min(3, len(texts)))
        if kind == "append" and len(texts) < 7:
            texts += [self.text(), self.text()]
        elif kind == "edit" and index != secret:
            texts[index] = self.text()
        elif kind == "secret" and secret is None:
            texts[index] = f"The word is {{}}. {self.text()}"
        elif kind == "forget" and secret is not None:
            texts[secret] = f"The word is gone. {self.text()}"
            edits = [Edit.declare(EditKind.REDACT, old=(secret,), new=(secret,), forget=True)]
        self.contexts[name] = texts
        policy = self.random.choice(POLICIES)
        self.log.append(f"  {name} {kind} {len(texts)} {policy and policy.name}")
        roles = ["system", *["user", "assistant"] * len(texts)]
        replies = [
            engine.thread(name).generate(
                [
                    {"role": role, "content": text.format(secret)}
                    for role, text in zip(roles, texts, strict=False)
                ],
                edits=edits,
                policy=policy,
                max_new_tokens=2,
            )
            for engine, secret in zip(self.engines, self.SECRETS, strict=True)
        ]
        reports = [reply.report for reply in replies]
        assert len({report.tokens for report in reports}) == 1
        if not any("{}" in text for text in texts):
            close(replies[0].first_logits, replies[1].first_logits)
            assert len({(report.prefix, report.restored) for report in reports}) == 1
            self.compared += reports[0].restored > 0

    def suspend(self) -> None:
        for name in self.contexts:
            if self.random.random() < 0.5:
                for engine in self.engines:
                    engine.thread(name).suspend()

    def fork(self) -> None:
        if 0 < len(self.contexts) < 8:
            name, copy = self.random.choice([*self.contexts]), f"t{len(self.contexts)}"
            self.contexts[copy] = self.contexts[name]
            self.log.append(f"  {copy} of {name}")
            for engine in self.engines:
                engine.thread(name).fork(copy)

    def restart(self) -> None:
        self.start()

    def resize(self) -> None:
        budget = self.random.choice([10**10, 10**7, 2 * 10**6, 10**6, 1])
        for engine in self.engines:
            engine.pool.memory_budget_bytes = budget

    def break_store(self) -> None:
        calls = self.random.sample(["save", "open", "versions", "delete"], 1)
        failing = set(calls if self.random.random() < 0.5 else [])
        for store in self.stores:
            store.failing = failing


@pytest.mark.parametrize("seed", SEEDS)
def test_what_was_forgotten_has_no_influence(plain, seed):
    worlds = Worlds(plain, seed)
    for number in range(STEPS):
        try:
            worlds.step()
        except BaseException as error:
            error.add_note(f"seed {seed}, step {number}: " + "\n".join(worlds.log[-60:]))
            raise
    assert worlds.compared > 0
