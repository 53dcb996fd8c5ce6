"""Checks and times every kernel, and a whole resume, on this machine's GPU."""
