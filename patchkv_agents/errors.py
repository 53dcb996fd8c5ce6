"""Errors of the package. Each message says what is wrong and what to do next."""

from __future__ import annotations


class PatchKVError(Exception):
    """Base of all errors raised on purpose. `exit_status` is what the command line exits with."""

    exit_status = 1


class InputError(PatchKVError):
    """What the caller passed in cannot be used (wrong shape, not JSON, empty)."""

    exit_status = 2


class ContextError(InputError):
    """A message, a message list or a tool list is malformed."""


class TemplateError(InputError):
    """The model's chat template refuses the messages."""


class ContextTooLongError(InputError):
    """The rendered context does not fit the model's limit."""


class ModelNotFoundError(InputError):
    """No model or tokenizer can be loaded under the given name."""


class UnsupportedModelError(PatchKVError):
    """The model keeps state that this engine cannot hold correctly."""

    exit_status = 2


class ProfileError(InputError):
    """A recovery profile cannot be read, or was made for another model."""


class CheckpointError(PatchKVError):
    """A stored checkpoint cannot be read, written or trusted. Exact prefill does without it."""


class HistoryStoreError(PatchKVError):
    """A store of histories cannot be opened, read or written. What it held is unchanged."""


class ConflictError(PatchKVError):
    """Somebody else changed the context meanwhile; nothing of theirs or yours is lost."""
