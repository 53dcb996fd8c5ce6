"""Runs methods on one edited episode, from states that they share."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from patchkv_agents.context import Conversation
from patchkv_agents.engine import Engine, Reply, Thread
from patchkv_agents.engine.scoring import answer_log_probs
from patchkv_agents.profiling.comparison import CONTINUATION_TOKENS, method_result
from patchkv_agents.profiling.states import SharedStates
from patchkv_agents.recovery import RecoveryPolicy, RecoverySetup
from patchkv_evals.episodes import Episode, EpisodeVersion
from patchkv_evals.metrics import answer_margin, answer_margin_recovery, scorer, stale_answer
from patchkv_evals.running.measures import cost, quality, report_fields
from patchkv_evals.running.spec import FULL_PREFILL


@dataclass(frozen=True, slots=True)
class Step:
    """One edit: the context before and after it, and the answers that it made wrong.

    Attributes:
        number: of a chain's edit, from 1; 0 where there is but one.
    """

    number: int
    old: EpisodeVersion
    new: EpisodeVersion
    stale_answers: tuple[str, ...]


def steps_of(episode: Episode) -> list[Step]:
    """The edits of an episode, in order."""
    is_chain = len(episode.versions) > 2
    return [
        Step(
            number if is_chain else 0,
            episode.versions[number - 1],
            episode.versions[number],
            episode.stale_answers(number),
        )
        for number in range(1, len(episode.versions))
    ]


@dataclass(slots=True, eq=False)
class _Attempt:
    """One method on one edit, as far as it has come.

    Attributes:
        origin: the thread that it resumes from, None for the full prefill.
        store_ms: what storing that took.
        replies: of each round.
        margin: of the new answer's log-probability over the stale one's.
        margin_before: the same in the old context; of the full prefill only.
        error: why it could not be done.
    """

    origin: Thread | None = None
    store_ms: float | None = None
    replies: list[Reply] = field(default_factory=list)
    margin: float | None = None
    margin_before: float | None = None
    error: Exception | None = None

    @contextmanager
    def noting_errors(self) -> Iterator[None]:
        try:
            yield
        except Exception as error:
            self.error = error


class MethodRuns:
    """All methods on the episodes of one row.

    The exact state of a context is computed once for all of them, be it what they resume from or
    the full prefill that they are compared with. In a chain, each method goes on from the state
    that it has itself recovered.

    Args:
        engine: runs everything.
        methods: by name.
        rounds: how often each resumes, interleaved.
        max_new_tokens: of each answer; at least `CONTINUATION_TOKENS` are generated.
    """

    def __init__(
        self,
        engine: Engine,
        methods: Mapping[str, RecoverySetup],
        *,
        rounds: int,
        max_new_tokens: int,
    ) -> None:
        self._engine = engine
        self._methods = {FULL_PREFILL: RecoverySetup(RecoveryPolicy.exact()), **methods}
        self._rounds = rounds
        self._answer_tokens = max(max_new_tokens, CONTINUATION_TOKENS)
        maps = any(setup.policy.method.needs_map for setup in methods.values())
        self._states = SharedStates(engine, answer_tokens=self._answer_tokens, maps=maps)

    def close(self) -> None:
        """Give up all states, as between rows."""
        self._states.close()

    def warm_up(self, episode: Episode) -> None:
        """Resume by every method once, so that no first call of a process is timed.

        The full prefill needs none: it comes behind that of the old context.
        """
        step = steps_of(episode)[0]
        for name in [name for name in self._methods if name != FULL_PREFILL]:
            attempt = self._stored(name, step)
            if attempt.error is None:  # an error comes again when it counts
                with attempt.noting_errors():
                    self._resume(name, attempt.origin, step)

    def run(self, episode: Episode, methods: Sequence[str]) -> Iterator[dict[str, Any]]:
        """Run some methods, and the full prefill, on an episode.

        A method that fails on one edit of a chain has no state to go on from: it fails on those
        behind it too, for the same reason.

        Yields:
            Lines of results.jsonl, and those of failures.jsonl, which have a `reason`.
        """
        steps = steps_of(episode)
        attempts = {name: self._stored(name, steps[0]) for name in (FULL_PREFILL, *methods)}
        lost: dict[str, str] = {}  # why methods cannot go on
        for step in steps:
            if FULL_PREFILL not in lost:
                self._attempt(attempts, step, going_on=step is not steps[-1])
            for name in (FULL_PREFILL, *methods):
                line: dict[str, Any] = {
                    "episode": episode.id,
                    "row": episode.provenance.row_id,
                    "edit": episode.provenance.spec.kind,
                    "method": name,
                    "step": step.number,
                }
                if name not in lost:
                    attempt = attempts[name]
                    with attempt.noting_errors():
                        line |= self._result(episode, step, attempts[FULL_PREFILL], attempt)
                    if attempt.error is not None:
                        lost[name] = f"{type(attempt.error).__name__}: {attempt.error}"
                if FULL_PREFILL in lost:  # nothing to compare any method with
                    yield {**line, "method": None, "reason": lost[FULL_PREFILL]}
                    break
                yield {**line, "reason": lost[name]} if name in lost else line
            attempts = {
                name: _Attempt(origin=attempt.origin)
                for name, attempt in attempts.items()
                if name not in lost
            }

    def _stored(self, name: str, step: Step) -> _Attempt:
        """A method that has not begun, with the state that it resumes from."""
        attempt = _Attempt()
        if name != FULL_PREFILL:
            with attempt.noting_errors():
                state = self._states.stored(step.old.context, self._methods[name].storage)
                attempt.origin, attempt.store_ms = state.thread, state.store_ms
        return attempt

    def _attempt(self, attempts: Mapping[str, _Attempt], step: Step, *, going_on: bool) -> None:
        """Run methods on one edit in interleaved rounds; `attempts` change.

        Where there are edits to come, `origin` becomes the state after this one; else it goes.
        """
        after: dict[str, Thread] = {}
        for number in range(self._rounds):
            for name, attempt in attempts.items():
                if attempt.error is not None:
                    continue
                with attempt.noting_errors():
                    if number:
                        attempt.replies.append(self._resume(name, attempt.origin, step))
                    elif name == FULL_PREFILL:
                        attempt.replies.append(self._states.exact(step.new.context).reply)
                        attempt.margin = self._exact_margin(step.new.context, step)
                        attempt.margin_before = self._exact_margin(step.old.context, step)
                    else:
                        thread = self._answer(name, attempt, step)
                        if going_on:
                            thread.suspend("now")
                            self._engine.flush()
                            after[name] = thread
                        else:
                            self._states.release(thread)
        for name, attempt in attempts.items():
            if attempt.origin is not None and step.number > 1:  # the method's own, not shared
                self._states.release(attempt.origin)
            attempt.origin = after.get(name)

    def _answer(self, name: str, attempt: _Attempt, step: Step) -> Thread:
        """The first round of a method."""
        thread, reply = self._states.resume(
            attempt.origin,
            step.new.context,
            self._methods[name].policy,
            max_new_tokens=self._answer_tokens,
        )
        attempt.replies.append(reply)
        attempt.margin = self._margin(thread, reply, step)
        return thread

    def _resume(self, name: str, origin: Thread | None, step: Step) -> Reply:
        """Resume for the sake of its time."""
        thread, reply = self._states.resume(
            origin, step.new.context, self._methods[name].policy, max_new_tokens=1
        )
        self._states.release(thread)
        return reply

    def _exact_margin(self, context: Conversation, step: Step) -> float | None:
        """The margin of the step's answers in the exact state of a context."""
        if not step.stale_answers:
            return None
        state = self._states.exact(context)
        thread, reply = self._states.resume(
            state.thread, state.context, RecoveryPolicy.exact(), max_new_tokens=1
        )
        margin = self._margin(thread, reply, step)
        self._states.release(thread)
        return margin

    def _margin(self, thread: Thread, reply: Reply, step: Step) -> float | None:
        """The margin of the step's answers in the state that a thread has just answered from."""
        if not step.stale_answers:
            return None
        tokenizer = self._engine.tokenizer
        new, stale = (
            answer_log_probs(thread, reply, tokenizer.encode(answer, add_special_tokens=False))
            for answer in (step.new.answers[0], step.stale_answers[0])
        )
        return answer_margin(new, stale)

    def _result(
        self, episode: Episode, step: Step, reference: _Attempt, attempt: _Attempt
    ) -> dict[str, Any]:
        """What a record holds beyond its place."""
        if attempt.error is not None:
            raise attempt.error
        dataset, answers, full = episode.provenance.dataset, step.new.answers, reference.replies[0]
        score = scorer(dataset)
        result = method_result(full, attempt.replies)
        figures = quality(result, full.text, answers, score)
        figures |= {"stale_answer": None, "answer_margin_recovery": None}
        if step.stale_answers:
            text = result.reply.text
            figures["stale_answer"] = stale_answer(text, step.stale_answers, answers, score)
        before = reference.margin_before
        if attempt.margin is not None and reference.margin is not None and before is not None:
            figures["answer_margin_recovery"] = answer_margin_recovery(
                attempt.margin, reference.margin, before
            )
        figures |= cost(result.reply.report, self._engine.adapter)
        figures["store_ms"] = attempt.store_ms
        old_report = self._states.exact(step.old.context).reply.report
        return {
            "dataset": dataset,
            "tokens_old": old_report.tokens,
            "tokens_new": result.reply.report.tokens,
            "prediction": result.reply.text,
            "answers": list(step.new.answers),
            "stale_answers": list(step.stale_answers),
            "metrics": figures,
            "rounds_ms": list(result.rounds_ms),
            "report": report_fields(result.reply.report),
        }
