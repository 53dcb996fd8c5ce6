"""Offline profiling: pairs of contexts, what is fitted to them, the profile, and its gate."""
