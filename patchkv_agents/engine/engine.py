"""The engine: one model, and the threads that use it."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from patchkv_agents.backends.transformers.adapter import ModelAdapter
from patchkv_agents.backends.transformers.loading import LoadOptions, load_config, load_model
from patchkv_agents.backends.transformers.support import Support, check_config
from patchkv_agents.checkpoint.precision import PrecisionPolicy
from patchkv_agents.context import ThreadKey
from patchkv_agents.engine.observers import CallObservers
from patchkv_agents.engine.outcomes import Observer
from patchkv_agents.engine.persistence import ThreadStores
from patchkv_agents.engine.pool import MAX_THREADS, ThreadPool
from patchkv_agents.engine.runtime import ModelRuntime
from patchkv_agents.engine.sequence import Packing
from patchkv_agents.engine.shadow import Shadow, ShadowChecks
from patchkv_agents.engine.thread import Thread
from patchkv_agents.recovery.policy import RecoveryPolicy
from patchkv_agents.recovery.profile import Profile
from patchkv_kernels import Rope

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase
    from typing_extensions import Unpack

    from patchkv_agents.checkpoint.stores.base import CheckpointStore
    from patchkv_agents.context import HistoryStore

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
        storage: the formats in which rows are packed, unless an exact policy recovered them; a
            thread may have its own. Those of the profile if left out, or the default mix.
        store: keeps suspended versions beyond this process; a thread that has no state here looks
            for it there.
        history: keeps the threads' histories beyond this process; in memory if left out. It
            knows no tenants: give each its own.
        tenant: whose threads these are; in a store, no other tenant's state is ever used.
        memory_budget_bytes: of the KV state of all threads, live and stored; a quarter of the
            machine's memory if left out. Beyond it, threads used longest ago are suspended, then
            packed with loss, then evicted.
        max_threads: threads that are kept; one used longer ago is given up.
        packing: `"now"` packs at each suspend, whatever room there is.
        observer: called after each call, such as `patchkv_agents.telemetry.telemetry()`.
        shadow: compares a sample of approximate answers with full prefills, in the background.
        clock_ns: nanoseconds, for the times in reports.

    Attributes:
        runtime: the model and what runs it.
        pool: the threads.
        stores: where threads are kept beyond this process.
        profile: the model's profile, if one was given.
        tenant: whose threads these are.

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
        storage: PrecisionPolicy | None = None,
        store: CheckpointStore | None = None,
        history: HistoryStore | None = None,
        tenant: str = "default",
        memory_budget_bytes: int | None = None,
        max_threads: int = MAX_THREADS,
        packing: Packing = "under_pressure",
        observer: Observer | None = None,
        shadow: ShadowChecks | None = None,
        clock_ns: Callable[[], int] = time.perf_counter_ns,
    ) -> None:
        runtime = ModelRuntime(model, tokenizer, clock_ns=clock_ns)
        self.runtime = runtime
        self.profile = _loaded(recovery_profile)
        if self.profile is not None:
            self.profile.check(runtime.fingerprint, runtime.name)
        self.tenant = tenant
        self.stores = ThreadStores(lambda: runtime.fingerprint, tenant, store, history)
        self._observers = CallObservers(
            observer, None if shadow is None else Shadow(shadow, runtime.exact_logits)
        )
        self.pool = ThreadPool(
            runtime,
            self.stores,
            self._observers,
            policy=policy or self._profiled_policy(),
            storage=storage or self._default_storage(),
            packing=packing,
            memory_budget_bytes=memory_budget_bytes,
            max_threads=max_threads,
        )

    @classmethod
    def from_pretrained(
        cls,
        name: str,
        *,
        policy: RecoveryPolicy | None = None,
        recovery_profile: Profile | str | Path | None = None,
        storage: PrecisionPolicy | None = None,
        store: CheckpointStore | None = None,
        history: HistoryStore | None = None,
        tenant: str = "default",
        memory_budget_bytes: int | None = None,
        max_threads: int = MAX_THREADS,
        packing: Packing = "under_pressure",
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
            storage=storage,
            store=store,
            history=history,
            tenant=tenant,
            memory_budget_bytes=memory_budget_bytes,
            max_threads=max_threads,
            packing=packing,
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

    def _default_storage(self) -> PrecisionPolicy:
        return PrecisionPolicy() if self.profile is None else self.profile.storage

    @property
    def storage(self) -> PrecisionPolicy:
        """The formats in which rows are packed, of threads that have none of their own."""
        return self.pool.storage

    @property
    def adapter(self) -> ModelAdapter:
        """Runs the model."""
        return self.runtime.adapter

    @property
    def rope(self) -> Rope:
        """How the model rotates its keys."""
        return self.runtime.rope

    @property
    def support(self) -> Support:
        """How far recovery works with the model."""
        return self.runtime.support

    @property
    def tokenizer(self) -> PreTrainedTokenizerBase:
        """The model's tokenizer."""
        return self.runtime.tokenizer

    @property
    def fingerprint(self) -> str:
        """Names the model in stores: equal where keys and values are (see `model_fingerprint`)."""
        return self.runtime.fingerprint

    @property
    def model_name(self) -> str:
        """The model's id, or the name of the folder that it was loaded from."""
        return self.runtime.name

    @property
    def max_tokens(self) -> int:
        """The model's limit, prompt and answer together."""
        return self.runtime.max_tokens

    @property
    def end_tokens(self) -> frozenset[int]:
        """Ids that end an answer."""
        return self.runtime.end_tokens

    def check_length(self, tokens: int) -> None:
        """Check that a prompt leaves room for an answer; see `ModelRuntime.check_length`."""
        self.runtime.check_length(tokens)

    @property
    def policy(self) -> RecoveryPolicy:
        """How contexts are recovered unless a call says otherwise."""
        return self.pool.policy

    @policy.setter
    def policy(self, policy: RecoveryPolicy) -> None:
        self.pool.policy = policy

    @property
    def observer(self) -> Observer | None:
        """Called after each call."""
        return self._observers.observer

    @observer.setter
    def observer(self, observer: Observer | None) -> None:
        self._observers.observer = observer

    @property
    def shadow(self) -> Shadow | None:
        """What shadow checks have found, if there are some."""
        return self._observers.shadow

    def flush(self) -> None:
        """Wait until what was suspended so far is stored, or could not be (which is logged).

        To be called before another process takes up a thread.
        """
        self.runtime.wait_until_stored()
        self.stores.wait_until_saved()

    def thread(
        self,
        thread_id: str,
        *,
        namespace: str = "",
        new: bool = False,
        storage: PrecisionPolicy | None = None,
    ) -> Thread:
        """The thread of this id, made at its first use.

        Args:
            thread_id: of the conversation.
            namespace: a part of it with a context of its own, such as a subagent.
            new: refuse a thread that exists.
            storage: the formats in which the rows of a new thread are packed; the engine's if left
                out.

        Raises:
            InputError: `new` is set and the thread exists.
        """
        return self.pool.thread(ThreadKey(thread_id, namespace), new=new, storage=storage)

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
        key = ThreadKey(thread_id, namespace)
        self.pool.drop(key)
        if delete:
            self.stores.delete(key, erase=erase)


def _loaded(profile: Profile | str | Path | None) -> Profile | None:
    return Profile.load(profile) if isinstance(profile, (str, Path)) else profile
