"""What holds for every rendered context."""

from __future__ import annotations

from typing import Any

import numpy as np

from patchkv_agents.context import RenderedContext
from patchkv_agents.context.rendering.encoding import Encoder


def decoded(tokenizer: Any, rendered: RenderedContext) -> list[str]:
    return [tokenizer.decode(rendered.token_ids[a:b]) for a, b in rendered.message_spans]


def check(rendered: RenderedContext, tokenizer: Any, *, ascending: bool = True) -> None:
    """What holds for every verified rendering."""
    assert rendered.verified and rendered.reason is None
    assert rendered.token_ids.dtype == np.int64 and not rendered.token_ids.flags.writeable
    assert tokenizer.decode(rendered.token_ids) == rendered.text
    spans = rendered.message_spans if ascending else sorted(rendered.message_spans)
    assert all(0 <= a <= b <= len(rendered) for a, b in spans)
    assert all(a[1] <= b[0] for a, b in zip(spans, spans[1:], strict=False))
    for part in rendered.part_spans:
        if part.message >= 0 and part.stop > part.start:
            start, stop = rendered.message_spans[part.message]
            assert start <= part.start < part.stop <= stop


def control_tokens(tokenizer: Any, rendered: RenderedContext) -> list[str]:
    """The control tokens among the ids, in order."""
    controls = set(tokenizer.convert_tokens_to_ids(Encoder.of(tokenizer).controls))
    ids = rendered.token_ids.tolist()
    return [tokenizer.decode([token_id]) for token_id in ids if token_id in controls]
