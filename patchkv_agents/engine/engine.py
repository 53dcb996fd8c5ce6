"""The engine: one model, and the threads that use it."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

from patchkv_agents.engine.adapter import ModelAdapter
from patchkv_agents.engine.generation import end_tokens
from patchkv_agents.engine.loading import load_model
from patchkv_agents.engine.support import rope_of
from patchkv_agents.engine.thread import Thread
from patchkv_agents.errors import ContextError, ContextTooLongError, InputError
from patchkv_agents.recovery.policy import RecoveryPolicy

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel, PreTrainedTokenizerBase


class Engine:
    """Runs one Transformers model for any number of threads.

    Args:
        model: a loaded causal language model in evaluation mode. Its attention implementation is
            set to `patchkv`, which outside the engine's calls is plain SDPA.
        tokenizer: its tokenizer, with a chat template.
        policy: how edited contexts are recovered unless a call says otherwise. Without one,
            recovery is exact.

    Raises:
        UnsupportedModelError: the model keeps state that cannot be recovered this way.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase,
        *,
        policy: RecoveryPolicy | None = None,
    ) -> None:
        self.rope = rope_of(model)
        self.adapter = ModelAdapter(model)
        self.tokenizer = tokenizer
        self.policy = policy or RecoveryPolicy.exact()
        self.end_tokens = end_tokens(tokenizer, model.generation_config)
        self.lock = threading.RLock()
        self._threads: dict[str, Thread] = {}

    @classmethod
    def from_pretrained(
        cls,
        name: str,
        *,
        policy: RecoveryPolicy | None = None,
        dtype: str | torch.dtype | None = None,
        device: str | torch.device | None = None,
    ) -> Engine:
        """Load a model by name: `smollm2` (the embedded model), a local folder or a model id.

        Raises:
            ModelNotFoundError: nothing can be loaded under this name.
            UnsupportedModelError: see `Engine`.
        """
        model, tokenizer = load_model(name, dtype=dtype, device=device)
        return cls(model, tokenizer, policy=policy)

    @property
    def max_tokens(self) -> int:
        """The model's limit, prompt and answer together."""
        return self.adapter.max_tokens

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
                f"the context has {tokens} tokens, and the model's limit is {self.max_tokens} with "
                "at least one for the answer: shorten or summarise messages, or use a model with "
                "a longer context"
            )

    def thread(self, thread_id: str, *, new: bool = False) -> Thread:
        """The thread of this id, made at its first use.

        Raises:
            InputError: `new` is set and the thread exists.
        """
        with self.lock:
            if new and thread_id in self._threads:
                raise InputError(f"thread '{thread_id}' exists: choose another id or drop it")
            if thread_id not in self._threads:
                self._threads[thread_id] = Thread(self, thread_id)
            return self._threads[thread_id]

    def drop(self, thread_id: str) -> None:
        """Forget a thread, its history and all its state. Unknown ids are ignored."""
        with self.lock:
            self._threads.pop(thread_id, None)
