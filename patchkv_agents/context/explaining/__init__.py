"""Explains why a common prefix ends where it does."""
