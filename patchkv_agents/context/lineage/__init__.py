"""Lineage of contexts: which version a context was made from, and what came of which.

Agent frameworks hand over a list of messages, and at best a checkpoint id of their own. The edits
and the KV state of a context depend on the version that it came from. `parents.find_parent` is the
one place that decides it; what a framework knows comes in as a `Hint`, which `checkpoints` makes of
its checkpoint ids.
"""
