"""A model, ready to run: what all threads over it share."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

from patchkv_agents.backends.transformers.adapter import NO_LIMIT, ModelAdapter
from patchkv_agents.backends.transformers.fingerprint import model_fingerprint
from patchkv_agents.backends.transformers.support import support_of
from patchkv_agents.engine.generation import end_tokens
from patchkv_agents.errors import ContextError, ContextTooLongError
from patchkv_agents.jobs import submitted
from patchkv_agents.ranges import IntArray, RowSet

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

_CHECK_ROWS = 128
"""Rows of a background prefill that run at a time: other calls wait for no more."""


class ModelRuntime:
    """One Transformers model with its tokenizer, and the worker that stores its rows.

    Args:
        model: a loaded causal language model in evaluation mode.
        tokenizer: its tokenizer, with a chat template.
        clock_ns: nanoseconds, for the times in reports.

    Attributes:
        support: how far recovery works with the model.
        rope: how its keys are rotated.
        adapter: runs it.
        end_tokens: ids that end an answer.
        offload_worker: stores rows in the background, one job at a time.

    Raises:
        UnsupportedModelError: the model keeps state that cannot be recovered this way.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase,
        *,
        clock_ns: Callable[[], int] = time.perf_counter_ns,
    ) -> None:
        self.support = support_of(model)
        self.rope = self.support.rope
        self.adapter = ModelAdapter(model)
        self.tokenizer = tokenizer
        self.end_tokens = end_tokens(tokenizer, model.generation_config)
        self.clock_ns = clock_ns
        ids: set[int] = set()
        self.offload_worker = ThreadPoolExecutor(
            1,
            thread_name_prefix="patchkv-offload",
            initializer=lambda: ids.add(threading.get_ident()),
        )
        self._worker_ids = ids

    @cached_property
    def fingerprint(self) -> str:
        """Names the model in stores: equal where keys and values are (see `model_fingerprint`)."""
        return model_fingerprint(self.adapter.model, self.tokenizer)

    @property
    def name(self) -> str:
        """The model's id, or the name of the folder that it was loaded from."""
        model = self.adapter.model
        name = model.config.name_or_path or type(model).__name__
        return Path(name).name if Path(name).exists() else name

    @property
    def max_tokens(self) -> int:
        """The model's limit, prompt and answer together."""
        return min(self.adapter.max_tokens, self.support.verdict.max_tokens or NO_LIMIT)

    def check_length(self, tokens: int) -> None:
        """Check that a prompt of `tokens` tokens leaves room for an answer.

        Raises:
            ContextError: there are no tokens.
            ContextTooLongError: there are too many.
        """
        if tokens == 0:
            raise ContextError(
                "the chat template renders these messages to nothing: add a message with content"
            )
        if tokens >= self.max_tokens:
            raise ContextTooLongError(
                f"this model's maximum context length is {self.max_tokens} tokens, and the context "
                f"has {tokens}; at least one is needed for the answer: shorten or summarize the "
                "messages, or use a model with a longer context"
            )

    def exact_logits(self, token_ids: IntArray, give_way: Callable[[], None]) -> torch.Tensor:
        """Logits of the last token by a full prefill of which nothing is kept.

        Args:
            token_ids: int64 `[tokens]`.
            give_way: called before each piece of the prefill.
        """
        cache = self.adapter.new_cache(len(token_ids))
        chunks = list(RowSet.of_range(0, len(token_ids)).chunks(_CHECK_ROWS))
        for chunk in chunks[:-1]:
            give_way()
            self.adapter.forward_rows(token_ids, chunk, cache)
        give_way()
        return self.adapter.forward_rows(token_ids, chunks[-1], cache)

    def wait_until_stored(self) -> None:
        """Wait until all rows that are on their way to memory are stored.

        In the worker itself, where the garbage collector may close a stream that nobody refers to,
        it does not wait: what is on its way comes after whatever runs there now.
        """
        if threading.get_ident() in self._worker_ids:
            return
        submitted(lambda: None, self.offload_worker).result()
