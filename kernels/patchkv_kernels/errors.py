"""Errors of the kernels."""

from __future__ import annotations


class PayloadError(ValueError):
    """Tensors do not have the form that a payload or a kernel needs."""
