"""The engine: one model, and the threads that use it."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Collection
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

from patchkv_agents.backends.transformers.adapter import NO_LIMIT, ModelAdapter
from patchkv_agents.backends.transformers.fingerprint import model_fingerprint
from patchkv_agents.backends.transformers.loading import LoadOptions, load_config, load_model
from patchkv_agents.backends.transformers.support import check_config, support_of
from patchkv_agents.checkpoint import CheckpointKey
from patchkv_agents.checkpoint.versions import DEFAULT_BUDGET_BYTES
from patchkv_agents.context import ContextHistory, ThreadKey
from patchkv_agents.engine.generation import end_tokens
from patchkv_agents.engine.outcomes import CallOutcome, Observer
from patchkv_agents.engine.persistence import StoredThread
from patchkv_agents.engine.thread import Thread
from patchkv_agents.errors import (
    CheckpointError,
    ContextError,
    ContextTooLongError,
    InputError,
)
from patchkv_agents.jobs import submitted
from patchkv_agents.profiling.profile import Profile
from patchkv_agents.profiling.shadow import Shadow, ShadowChecks
from patchkv_agents.ranges import IntArray, RowSet
from patchkv_agents.recovery.policy import RecoveryPolicy

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel, PreTrainedTokenizerBase
    from typing_extensions import Unpack

    from patchkv_agents.checkpoint.stores.base import CheckpointStore
    from patchkv_agents.context import HistoryStore
    from patchkv_agents.engine.reply import Reply

_SHADOW_ROWS = 128
"""Rows of a shadow check that run at a time: whoever comes meanwhile waits for no more."""

_LOG = logging.getLogger(__name__)


class Engine:
    """Runs one Transformers model for any number of threads.

    Threads may be used from different Python threads at once. They take turns at the model, those
    who wait longest first: a decode step is one turn, a prefill one for each 512 rows. So none
    waits longer than a turn of each other one, and times in reports include that. Contexts are not
    batched: a resume of a few hundred rows keeps the hardware busy by itself (packing
    four threads' rows gained 1.3 times at 128 rows each, at most).

    Args:
        model: a loaded causal language model in evaluation mode. Its attention implementation is
            set to `patchkv`, which outside the engine's calls is plain SDPA.
        tokenizer: its tokenizer, with a chat template.
        policy: how edited contexts are recovered unless a call says otherwise. Without one, it is
            the profile's if that has passed validation; else recovery is exact.
        recovery_profile: of this model: a file, the name of a profile that comes with the package,
            or one that is loaded.
        store: keeps suspended versions beyond this process; a thread that has no state here looks
            for it there.
        history: keeps the threads' histories beyond this process; in memory if left out. It
            knows no tenants: give each its own.
        tenant: whose threads these are; in a store, no other tenant's state is ever used.
        versions_budget_bytes: payload of suspended versions that each thread keeps in memory.
        observer: called after each call, such as `patchkv_agents.telemetry.telemetry()`.
        shadow: compares a sample of approximate answers with full prefills, in the background.
        clock_ns: nanoseconds, for the times in reports.

    Attributes:
        profile: the model's profile, if one was given.
        shadow: what shadow checks have found, if there are some.

    Raises:
        ProfileError: the profile cannot be used, or is another model's.
        UnsupportedModelError: the model keeps state that cannot be recovered this way.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase,
        *,
        policy: RecoveryPolicy | None = None,
        recovery_profile: Profile | str | Path | None = None,
        store: CheckpointStore | None = None,
        history: HistoryStore | None = None,
        tenant: str = "default",
        versions_budget_bytes: int = DEFAULT_BUDGET_BYTES,
        observer: Observer | None = None,
        shadow: ShadowChecks | None = None,
        clock_ns: Callable[[], int] = time.perf_counter_ns,
    ) -> None:
        self.support = support_of(model)
        self.rope = self.support.rope
        self.adapter = ModelAdapter(model)
        self.tokenizer = tokenizer
        self.profile = _loaded(recovery_profile)
        if self.profile is not None:
            self.profile.check(self.fingerprint, self.model_name)
        self.policy = policy or self._profiled_policy()
        self.end_tokens = end_tokens(tokenizer, model.generation_config)
        self.registry = threading.RLock()
        self.tenant = tenant
        self.clock_ns = clock_ns
        self.versions_budget_bytes = versions_budget_bytes
        self.observer = observer
        self.shadow = None if shadow is None else Shadow(shadow, self._exact_logits)
        self.offload_worker = ThreadPoolExecutor(1, thread_name_prefix="patchkv-offload")
        self._store = store
        self._history = history
        self._store_queue = ThreadPoolExecutor(1, thread_name_prefix="patchkv-store")
        self._threads: dict[tuple[str, str], Thread] = {}

    @classmethod
    def from_pretrained(
        cls,
        name: str,
        *,
        policy: RecoveryPolicy | None = None,
        recovery_profile: Profile | str | Path | None = None,
        store: CheckpointStore | None = None,
        history: HistoryStore | None = None,
        tenant: str = "default",
        versions_budget_bytes: int = DEFAULT_BUDGET_BYTES,
        observer: Observer | None = None,
        shadow: ShadowChecks | None = None,
        **loading: Unpack[LoadOptions],
    ) -> Engine:
        """Load a model by name: `smollm2` (the embedded model), a folder, a GGUF file or an id.

        Other arguments are those of `Engine`, and how weights are loaded: `dtype`, `device`,
        `device_map`, `max_memory`, `offload_folder` and `quantization_config` (`LoadOptions`).

        Raises:
            InputError: an option of loading is wrong.
            ModelNotFoundError: nothing can be loaded under this name.
            ProfileError, UnsupportedModelError: see `Engine`.
        """
        profile = _loaded(recovery_profile)
        check_config(load_config(name))  # before the minutes that weights can take
        model, tokenizer = load_model(name, **loading)
        return cls(
            model,
            tokenizer,
            policy=policy,
            recovery_profile=profile,
            store=store,
            history=history,
            tenant=tenant,
            versions_budget_bytes=versions_budget_bytes,
            observer=observer,
            shadow=shadow,
        )

    def _profiled_policy(self) -> RecoveryPolicy:
        """The profile's policy if it may be used, else the exact one."""
        if self.profile is None:
            return RecoveryPolicy.exact()
        if not self.profile.has_passed:
            _LOG.warning(
                "recovery is exact, as the profile of %s may not be used: %s. Run "
                "`patchkv validate %s --profile PROFILE`, or give a policy",
                self.profile.model,
                self.profile.why_not_passed,
                self.model_name,
            )
            return RecoveryPolicy.exact()
        return self.profile.policy

    @cached_property
    def fingerprint(self) -> str:
        """Names the model in stores: equal where keys and values are (see `model_fingerprint`)."""
        return model_fingerprint(self.adapter.model, self.tokenizer)

    @property
    def model_name(self) -> str:
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

    @property
    def keeps_histories(self) -> bool:
        """Whether histories lie in a store that goes on after the threads."""
        return self._history is not None

    def answering(self) -> AbstractContextManager[None]:
        """To be held while a thread is answered: shadow checks make way."""
        return nullcontext() if self.shadow is None else self.shadow.answering()

    def check_in_shadow(self, thread: ThreadKey, token_ids: IntArray, reply: Reply) -> None:
        """Compare an answer with a full prefill later on, if it is approximate and of the sample.

        Args:
            thread: that gave it.
            token_ids: of its prompt.
            reply: the answer.
        """
        if self.shadow is not None and not reply.report.is_exact:
            self.shadow.offer(thread, reply.report.policy, token_ids, reply.first_logits)

    def _exact_logits(self, token_ids: IntArray, give_way: Callable[[], None]) -> torch.Tensor:
        """Logits of the last token by a full prefill that nothing is kept of."""
        cache = self.adapter.new_cache(len(token_ids))
        chunks = list(RowSet.of_range(0, len(token_ids)).chunks(_SHADOW_ROWS))
        for chunk in chunks[:-1]:
            give_way()
            self.adapter.forward_rows(token_ids, chunk, cache)
        give_way()
        return self.adapter.forward_rows(token_ids, chunks[-1], cache)

    def notify(self, outcome: CallOutcome) -> None:
        """Report a call to the observer, if there is one. It cannot make the call fail."""
        if self.observer is None:
            return
        try:
            self.observer(outcome)
        except Exception:
            _LOG.exception("the engine's observer failed")

    def open_history(self, thread_id: str, namespace: str = "") -> ContextHistory:
        """The thread's history: in the engine's history store, or in memory of its own.

        Raises:
            HistoryStoreError: the store cannot be read.
        """
        return ContextHistory(self._history, thread=thread_id, namespace=namespace)

    def known_threads(self) -> tuple[ThreadKey, ...]:
        """The threads whose histories lie in the engine's history store, last changed first.

        Raises:
            HistoryStoreError: the store cannot be read.
        """
        if self._history is None:
            return ()
        newest = {
            key: max(self._history.branches(key).values(), default="")
            for key in self._history.threads()
        }
        return tuple(sorted(newest, key=newest.__getitem__, reverse=True))

    def stored_thread(self, thread_id: str, namespace: str = "") -> StoredThread | None:
        """The thread's checkpoints in the store, if the engine has one."""
        if self._store is None:
            return None
        scope = CheckpointKey(self.fingerprint, self.tenant, thread_id, namespace, version="")
        return StoredThread(self._store, self._store_queue, scope)

    def flush(self) -> None:
        """Wait until what was suspended so far is stored, or could not be (which is logged).

        To be called before another process takes up a thread.
        """
        submitted(lambda: None, self.offload_worker).result()
        submitted(lambda: None, self._store_queue).result()

    def thread(self, thread_id: str, *, namespace: str = "", new: bool = False) -> Thread:
        """The thread of this id, made at its first use.

        Args:
            thread_id: of the conversation.
            namespace: a part of it with a context of its own, such as a subagent.
            new: refuse a thread that exists.

        Raises:
            InputError: `new` is set and the thread exists.
        """
        with self.registry:
            name = thread_id, namespace
            if new and name in self._threads:
                raise InputError(f"thread '{thread_id}' exists: choose another id or drop it")
            if name not in self._threads:
                self._threads[name] = Thread(self, thread_id, namespace)
            return self._threads[name]

    def clear_forks(
        self, thread: Thread, histories: Collection[ThreadKey], forgetting: str
    ) -> None:
        """Delete the KV state of the threads of these histories, `thread` itself left out.

        Args:
            thread: was told to forget.
            histories: that saw the same.
            forgetting: id of the version that says so. Of threads that are not open here, what
                is stored of versions made before it goes.

        Raises:
            CheckpointError: the store cannot delete it.
        """
        with self.registry:
            forks = [
                fork
                for fork in self._threads.values()
                if fork.history.key in histories and fork.history.store is thread.history.store
            ]
        failures = []
        for fork in forks:
            if fork is not thread:
                try:
                    fork.clear_for(forgetting)
                except CheckpointError as error:  # memory of all the others is cleared first
                    failures.append(error)
        if failures:
            raise failures[0]
        if self.keeps_histories:  # else the names of histories are not those of threads
            for key in {*histories} - {fork.history.key for fork in forks}:
                stored = self.stored_thread(key.thread, key.namespace)
                if stored is not None:
                    stored.forget(lambda version: version < forgetting, sweep=False)

    def drop(
        self, thread_id: str, *, namespace: str = "", delete: bool = False, erase: bool = True
    ) -> None:
        """Give up a thread: its state, and a history that is in memory. Unknown ids are ignored.

        Args:
            thread_id, namespace: of the thread.
            delete: also delete what the stores hold of the thread: its history, which may be
                damaged, and the checkpoints of all its namespaces.
            erase: clean the history store's files of what was deleted at once, which may rebuild
                them; else the store does so when it is opened the next time.

        Raises:
            CheckpointError, HistoryStoreError: a store cannot delete it.
        """
        with self.registry:
            self._threads.pop((thread_id, namespace), None)
        if delete:
            stored = self.stored_thread(thread_id, namespace)
            if stored is not None:
                stored.delete_all()
            if self._history is not None:
                key = ThreadKey(thread_id, namespace)
                with self._history.writing(key):
                    self._history.delete(key)
                if erase:
                    self._history.erase()


def _loaded(profile: Profile | str | Path | None) -> Profile | None:
    return Profile.load(profile) if isinstance(profile, (str, Path)) else profile
