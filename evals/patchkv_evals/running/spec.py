"""What a run measures."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, get_args

from patchkv_agents.engine import Engine
from patchkv_agents.provenance import command_line, created, versions
from patchkv_agents.recovery.named import method_names
from patchkv_evals.datasets import QARow
from patchkv_evals.episodes import EpisodeKind, EpisodeSpec
from patchkv_evals.errors import DataError
from patchkv_evals.provenance import SCHEMA, machine

FULL_PREFILL = "full_prefill"
"""The reference: always runs, and is no method to choose."""

MAIN_METHODS = (
    "prefix_cache",
    "direct_reuse",
    "cacheblend",
    "cacheblend_released",
    "patchkv_published",
    "patchkv",
)
ABLATIONS = ("patchkv", *(name for name in method_names() if name not in MAIN_METHODS))
"""PatchKV, and PatchKV with one part taken away or replaced."""

RowOrder = Literal["file", "random"]


@dataclass(frozen=True, slots=True)
class RunSpec:
    """What a run measures; see `EpisodeSpec` for the fields about episodes.

    Attributes:
        dataset: name of the data set.
        model: name of the model, as results show it.
        edits: kinds of edits.
        limit: stop after so many episodes of each kind; None for all that can be made.
        tokens: length of the newest version.
        position: where the first edited message starts, as a share.
        seed: of the episodes, and of rows in random order.
        rows: in which order the rows of the data set are used: that of the file, or one that
            `seed` draws, so that each seed measures on other rows. An episode of a row is the same
            either way.
        rounds: how often each method resumes; times are medians.
        max_new_tokens: of each answer; at least 16 are generated.
        data: where the rows come from, as results show it.
        data_sha256: of the data, so that a folder is only gone on with on the same.
        profile_sha256: of the policies of the profile that methods were made from, likewise; None
            where there was none.
    """

    dataset: str
    model: str
    edits: tuple[EpisodeKind, ...] = ("refresh",)
    limit: int | None = None
    tokens: int = 2048
    position: float = 0.2
    seed: int = 0
    rows: RowOrder = "file"
    rounds: int = 1
    max_new_tokens: int = 24
    data: str | None = None
    data_sha256: str | None = None
    profile_sha256: str | None = None

    def __post_init__(self) -> None:
        for edit in self.edits:
            self.episode(edit)
        if not self.edits or len(set(self.edits)) < len(self.edits):
            raise DataError("Name at least one kind of edit, and each once.")
        if self.rows not in get_args(RowOrder):
            raise DataError(f"There are no rows '{self.rows}': use file or random.")
        limit = 1 if self.limit is None else self.limit
        if min(limit, self.rounds, self.max_new_tokens) < 1:
            raise DataError("limit, rounds and max_new_tokens start at 1.")

    def episode(self, edit: EpisodeKind) -> EpisodeSpec:
        """What is wanted of the episodes of one kind of edit."""
        return EpisodeSpec(edit, tokens=self.tokens, position=self.position, seed=self.seed)

    def ordered(self, rows: Sequence[QARow]) -> Sequence[QARow]:
        """The rows in the order of their use."""
        if self.rows == "file":
            return rows
        return random.Random(self.seed).sample(rows, len(rows))

    def config(self, engine: Engine, methods: tuple[str, ...]) -> dict[str, Any]:
        """The content of config.json."""
        return {
            "schema": SCHEMA,
            "command": command_line(),
            "created": created(),
            "dataset": self.dataset,
            "data": self.data,
            "data_sha256": self.data_sha256,
            "profile_sha256": self.profile_sha256,
            "edits": list(self.edits),
            "methods": [FULL_PREFILL, *methods],
            "model": self.model,
            "fingerprint": engine.fingerprint,
            "dtype": str(engine.adapter.model.dtype).removeprefix("torch."),
            "limit": self.limit,
            "tokens": self.tokens,
            "position": self.position,
            "seed": self.seed,
            "rows": self.rows,
            "rounds": self.rounds,
            "max_new_tokens": self.max_new_tokens,
            "versions": versions(),
            "machine": machine(engine.adapter.device),
        }


def digest_of(path: Path | None, rows: Sequence[QARow]) -> str:
    """SHA-256, in hex, of a data file; of the rows themselves where there is none."""
    digest = hashlib.sha256()
    if path is None:
        digest.update(repr(rows).encode())
        return digest.hexdigest()
    with path.open("rb") as file:
        while block := file.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()
