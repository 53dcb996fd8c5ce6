"""Prefix cache: keep what precedes the first edit, recompute everything behind it."""

from __future__ import annotations

from dataclasses import replace

from patchkv_agents.recovery import RecoveryPolicy

PREFIX_CACHE = replace(RecoveryPolicy.exact(), name="prefix_cache")
"""The exact policy on the same engine: the same chunks, the same attention, the same restore."""
