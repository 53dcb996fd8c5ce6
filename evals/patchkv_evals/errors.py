"""Errors of the evaluations. Each message says what is wrong and what to do next."""

from __future__ import annotations

from patchkv_agents.errors import InputError, PatchKVError


class DataError(InputError):
    """A file or data set cannot be read at all; single bad rows are reported instead."""


class EpisodeError(InputError):
    """No episode of the wanted kind, length or shape can be made from a row."""


class ReportError(PatchKVError):
    """A report cannot be written."""
