"""Warnings of tracking, which never end a run."""

from __future__ import annotations

import logging
import warnings

_LOG = logging.getLogger("patchkv_langgraph")


class TrackingWarning(UserWarning):
    """Something of what a graph does to its context could not be recorded."""


def warn(text: str) -> None:
    """Issue a `TrackingWarning`; where warnings are errors, it is logged, so that runs go on."""
    try:
        warnings.warn(text, TrackingWarning, stacklevel=2)
    except TrackingWarning:
        _LOG.warning("%s", text)
