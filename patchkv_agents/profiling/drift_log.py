"""Drift behind the edits of pairs, kept in a file."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from patchkv_agents import __version__
from patchkv_agents.alignment import align
from patchkv_agents.context import Conversation, render
from patchkv_agents.engine import Engine
from patchkv_agents.profiling.drift import block_drift, drift_layers
from patchkv_agents.profiling.json_log import JsonLog, template_digest
from patchkv_agents.profiling.pairs import ContextPair
from patchkv_agents.profiling.states import SharedStates
from patchkv_agents.profiling.windows import Observation, observations
from patchkv_agents.recovery import RecoveryPolicy


class DriftLog:
    """Drift behind the edits of pairs, from their exact states; kept in a file."""

    def __init__(self, engine: Engine, block_size: int, path: Path) -> None:
        self._engine, self._block_size = engine, block_size
        head = {
            "release": __version__,
            "fingerprint": engine.fingerprint,
            "chat_template": template_digest(engine),
            "layers": list(drift_layers(engine)),
            "block_size": block_size,
        }
        self._log = JsonLog(path, head)
        self._found = dict(self._log.read(_logged_observations))

    def has(self, pair: ContextPair) -> bool:
        """Whether a pair was observed."""
        return pair.digest in self._found

    def of(self, pair: ContextPair) -> list[Observation]:
        """The observations of a pair."""
        return [replace(each, pair=pair.id) for each in self._found[pair.digest]]

    def observe(self, pair: ContextPair, states: SharedStates) -> None:
        """Compare the rows of a pair's exact states."""
        token_ids = [
            render(each, self._engine.tokenizer).token_ids for each in (pair.old, pair.new)
        ]
        alignment = align(*token_ids)
        with _Live(states, pair.old) as old, _Live(states, pair.new) as new:
            blocks = block_drift(self._engine, alignment, old, new, block=self._block_size)
        found = observations(pair.id, alignment, blocks)
        self._log.append(
            [{"digest": pair.digest, "observations": [each.to_json() for each in found]}]
        )
        self._found[pair.digest] = found


def _logged_observations(line: Mapping[str, Any]) -> tuple[str, list[Observation]]:
    """The digest of a pair, and its observations, from a line of the log."""
    return line["digest"], [Observation.from_json(each) for each in line["observations"]]


class _Live:
    """The rows of a context's exact state, in a cache for as long as they are looked at."""

    def __init__(self, states: SharedStates, context: Conversation) -> None:
        self._states, self._context = states, context

    def __enter__(self) -> Any:
        state = self._states.exact(self._context)
        self._thread, _ = self._states.resume(
            state.thread, state.context, RecoveryPolicy.exact(), max_new_tokens=1
        )
        return self._thread.sequence.live_cache

    def __exit__(self, *error: object) -> None:
        self._states.release(self._thread)
