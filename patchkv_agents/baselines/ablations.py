"""PatchKV with one part taken away or replaced, to see what that part does."""

from __future__ import annotations

from dataclasses import replace

from patchkv_agents.checkpoint.precision import PrecisionPolicy
from patchkv_agents.recovery import RecoveryPolicy, Selection
from patchkv_kernels import PayloadFormat

_PATCHKV = RecoveryPolicy.default()

ABLATIONS = (
    replace(_PATCHKV, name="patchkv_no_attention", attention_fraction=0.0),
    replace(_PATCHKV, name="patchkv_no_window", window_tokens=0),
    replace(_PATCHKV, name="patchkv_no_tail", tail_tokens=1),
    replace(_PATCHKV, name="patchkv_contiguous", selection=Selection.CONTIGUOUS),
    replace(_PATCHKV, name="patchkv_fp16", precision=PrecisionPolicy.fixed(PayloadFormat.F16)),
    replace(_PATCHKV, name="patchkv_int8", precision=PrecisionPolicy.fixed(PayloadFormat.K8V8)),
    replace(_PATCHKV, name="patchkv_int4", precision=PrecisionPolicy.fixed(PayloadFormat.K4V4)),
)
"""What is stored in one format has all of the default's rows; `patchkv_int4` has 4-bit keys too,
which nothing else uses, to compare with published figures."""
