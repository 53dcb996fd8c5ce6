"""Policies tried on pairs: how far each one's answer is from a full prefill's, and what it costs.

All calibration and validation goes through here. Trials are appended to a log, so that a run that
was interrupted goes on where it was.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from patchkv_agents import __version__
from patchkv_agents.checkpoint.precision import PrecisionPolicy
from patchkv_agents.engine import Engine, Reply, Thread
from patchkv_agents.profiling.answers import same_answer, stale_answer
from patchkv_agents.profiling.comparison import CONTINUATION_TOKENS, method_result
from patchkv_agents.profiling.json_log import JsonLog, template_digest
from patchkv_agents.profiling.pairs import ContextPair
from patchkv_agents.profiling.states import LOSSLESS, SharedStates
from patchkv_agents.progress import Progress, ProgressCallback, ignore_progress
from patchkv_agents.recovery import RecoveryPolicy, RecoverySetup
from patchkv_agents.recovery.files import to_json

SCHEMA = 4
MAX_KL = 1e6
"""What an infinite divergence counts as, in nats."""


@dataclass(frozen=True, slots=True)
class Trial:
    """One policy on one pair.

    Attributes:
        pair: id of the pair.
        setup_key: of the policy and its storage; see `setup_key`.
        first_token_kl: KL(full prefill || policy) of the first output token, in nats.
        top1_agree: whether both have the same most likely first token.
        exact_continuation: whether the first 16 greedy tokens are equal; None where fewer were
            generated.
        same_answer: whether the answers are equal after normalisation; None likewise.
        stale, full_prefill_stale: whether the policy's answer, and the full prefill's, is the one
            from before the edit; None where that is not known.
        repair_ratio: share of the suffix that was recomputed.
        recompute_ratio: rows that ran / rows behind the exact prefix.
        new_tokens, window_tokens, attention_tokens, tail_tokens: computed rows, by reason.
        planning_ms, resume_ttft_ms: see `RecoveryReport`; of one run.
    """

    pair: str
    setup_key: str
    first_token_kl: float
    top1_agree: bool
    exact_continuation: bool | None
    same_answer: bool | None
    stale: bool | None
    full_prefill_stale: bool | None
    repair_ratio: float
    recompute_ratio: float
    new_tokens: int
    window_tokens: int
    attention_tokens: int
    tail_tokens: int
    planning_ms: float
    resume_ttft_ms: float


Observe = Callable[[ContextPair, SharedStates], None]
"""Looks at the exact states of a pair, `states.exact(pair.old)` and `states.exact(pair.new)`."""


def setup_key(setup: RecoverySetup) -> str:
    """Names what a method does: equal for methods that differ in nothing but their names."""
    fields = [to_json(setup.policy.method), to_json(setup.storage)]
    return hashlib.blake2b(json.dumps(fields, sort_keys=True).encode(), digest_size=8).hexdigest()


class Trials:
    """Runs policies on pairs. The states of one pair are in memory at a time.

    Args:
        engine: runs everything, on threads whose names begin with `compare/`.
        pairs: each has a suffix, and fits the model (see `patchkv_agents.profiling.checking`).
        log: JSONL file to which trials are appended and from which those of earlier runs are
            taken; None keeps them in memory.
        answer_tokens: most tokens of each answer; from `CONTINUATION_TOKENS` on, continuations and
            answers are compared too.

    Raises:
        InputError: the log is of another model or of answers of another length.
    """

    def __init__(
        self,
        engine: Engine,
        pairs: Sequence[ContextPair],
        log: Path | None = None,
        *,
        answer_tokens: int = 1,
    ) -> None:
        self._engine = engine
        self._pairs = tuple(pairs)
        self._answer_tokens = answer_tokens
        self._found: dict[tuple[str, str], Trial] = {}
        self._references: dict[str, Reply] = {}  # full prefill's answers, by the pair's digest
        head = {
            "schema": SCHEMA,
            "release": __version__,
            "fingerprint": engine.fingerprint,
            "chat_template": template_digest(engine),
            "answer_tokens": answer_tokens,
        }
        self._log = None if log is None else JsonLog(log, head)
        for digest, trial in [] if self._log is None else self._log.read(_logged_trial):
            self._found[digest, trial.setup_key] = trial

    def run(
        self,
        policies: Sequence[RecoveryPolicy],
        *,
        storage: PrecisionPolicy = LOSSLESS,
        observe: Observe | None = None,
        unobserved: Callable[[ContextPair], bool] = lambda pair: True,
        progress: ProgressCallback = ignore_progress,
    ) -> list[Trial]:
        """Try every policy on every pair, as far as the log does not have it yet.

        Args:
            policies: each is told by what it does, not by its name.
            storage: the formats in which the state that they resume from is packed.
            observe: called once for each pair that is `unobserved`, with its exact states.
            unobserved: whether a pair has to be looked at.
            progress: called before each pair that has something to do.

        Returns:
            The trials, pair by pair in the order of the policies.

        Raises:
            PatchKVError: the model's logits are not numbers.
        """
        setups = [RecoverySetup(policy, storage) for policy in policies]
        keys = {setup_key(setup): setup for setup in setups}
        todo: dict[str, list[RecoverySetup]] = {}
        for pair in self._pairs:
            missing = [
                setup for key, setup in keys.items() if (pair.digest, key) not in self._found
            ]
            if missing or (observe is not None and unobserved(pair)):
                todo[pair.id] = missing
        for pair in self._pairs:
            if pair.id not in todo:
                continue
            done = list(todo).index(pair.id)
            progress(Progress(pair.id, done, len(todo)))
            maps = any(setup.policy.method.needs_map for setup in todo[pair.id])
            with SharedStates(self._engine, answer_tokens=self._answer_tokens, maps=maps) as states:
                if observe is not None and unobserved(pair):
                    observe(pair, states)
                self._try(pair, states, todo[pair.id], warm_up=not done)
        found = [self._logged(pair, key) for pair in self._pairs for key in map(setup_key, setups)]
        return [trial for trial in found if trial is not None]

    def of(self, policy: RecoveryPolicy, storage: PrecisionPolicy = LOSSLESS) -> list[Trial]:
        """The trials that there are of a policy, in the order of the pairs."""
        key = setup_key(RecoverySetup(policy, storage))
        found = (self._logged(pair, key) for pair in self._pairs)
        return [trial for trial in found if trial is not None]

    def _logged(self, pair: ContextPair, key: str) -> Trial | None:
        """The trial of a pair, which may have had another id when it was logged."""
        trial = self._found.get((pair.digest, key))
        return None if trial is None else replace(trial, pair=pair.id)

    def _try(
        self,
        pair: ContextPair,
        states: SharedStates,
        setups: Sequence[RecoverySetup],
        *,
        warm_up: bool,
    ) -> None:
        if setups and pair.digest not in self._references:
            self._references[pair.digest] = states.exact(pair.new).reply
        for number, setup in enumerate(setups):
            origin = states.stored(pair.old, setup.storage).thread
            if warm_up and number == 0:  # no first call of a process is timed
                self._resume(states, origin, pair, setup.policy)
            reply = self._resume(states, origin, pair, setup.policy)
            trial = self._trial(pair, setup, self._references[pair.digest], reply)
            self._found[pair.digest, trial.setup_key] = trial
            if self._log is not None:
                self._log.append([{"digest": pair.digest, "trial": asdict(trial)}])

    def _resume(
        self, states: SharedStates, origin: Thread, pair: ContextPair, policy: RecoveryPolicy
    ) -> Reply:
        thread, reply = states.resume(origin, pair.new, policy, max_new_tokens=self._answer_tokens)
        states.release(thread)
        return reply

    def _trial(
        self, pair: ContextPair, setup: RecoverySetup, reference: Reply, reply: Reply
    ) -> Trial:
        result = method_result(reference, [reply])
        answers = self._answer_tokens >= CONTINUATION_TOKENS
        stale_known = answers and bool(pair.stale_answers)
        stale, stale_before = (
            stale_answer(each.text, pair.stale_answers, pair.answers) if stale_known else None
            for each in (reply, reference)
        )
        report = reply.report
        return Trial(
            pair=pair.id,
            setup_key=setup_key(setup),
            first_token_kl=min(result.first_token_kl, MAX_KL),
            top1_agree=result.top1_agree,
            exact_continuation=result.exact_continuation if answers else None,
            same_answer=same_answer(reply.text, reference.text) if answers else None,
            stale=stale,
            full_prefill_stale=stale_before,
            repair_ratio=report.repair_ratio,
            recompute_ratio=report.recompute_ratio,
            new_tokens=report.new,
            window_tokens=report.window,
            attention_tokens=report.attention,
            tail_tokens=report.tail,
            planning_ms=report.planning_ms,
            resume_ttft_ms=report.resume_ttft_ms,
        )


def _logged_trial(line: Mapping[str, Any]) -> tuple[str, Trial]:
    """The digest of a pair, and its trial, from a line of the log."""
    return line["digest"], Trial(**line["trial"])
