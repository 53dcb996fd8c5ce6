"""PatchKV with one part taken away or replaced, to see what that part does."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from patchkv_agents.checkpoint.precision import PrecisionPolicy
from patchkv_agents.recovery import RecoveryPolicy, RecoverySetup, Selection
from patchkv_kernels import PayloadFormat

_CHANGES: dict[str, dict[str, Any]] = {
    "patchkv_attention": {"selection": Selection.BLOCKS, "attention_fraction": 0.06},
    "patchkv_no_window": {"window_tokens": 0, "window_model": None},
    "patchkv_no_tail": {"tail_tokens": 1},
    "patchkv_contiguous": {"selection": Selection.CONTIGUOUS},
    "patchkv_edited": {"selection": Selection.EDITED, "attention_fraction": 0.06},
    "patchkv_no_attention": {"attention_fraction": 0.0},
    "patchkv_question": {"selection": Selection.QUESTION, "attention_fraction": 0.06},
    "patchkv_uncapped": {"most_repaired": None},
}
"""What each of them changes. One that the policy has already leaves it as it is."""

_FORMATS = {
    "patchkv_fp16": PayloadFormat.F16,
    "patchkv_int8": PayloadFormat.K8V8,
    "patchkv_int4": PayloadFormat.K4V4,
}
"""Where all rows are stored in one format; `patchkv_int4` has 4-bit keys too, which nothing else
uses, to compare with published figures."""


def ablations(setup: RecoverySetup) -> tuple[RecoverySetup, ...]:
    """`setup` with one part changed, in every way there is."""

    def named(name: str, **changes: Any) -> RecoveryPolicy:
        return replace(setup.policy, name=name, **changes)

    return (
        *(replace(setup, policy=named(name, **changes)) for name, changes in _CHANGES.items()),
        *(
            RecoverySetup(named(name), PrecisionPolicy.fixed(format))
            for name, format in _FORMATS.items()
        ),
    )
