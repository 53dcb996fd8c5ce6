"""Kernels of PatchKV Agents: moving stored KV rows into a live cache."""

from patchkv_kernels.rotary import RopeLayout, rotate_keys

__all__ = ["RopeLayout", "rotate_keys"]
