"""Measurements of PatchKV Agents."""
