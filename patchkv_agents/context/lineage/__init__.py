"""Lineage of contexts: which version a context was made from.

Agent frameworks hand over a list of messages, and at best a checkpoint id of their own. The edits
and the KV state of a context depend on the version that it came from. `find_parent` is the one
place that decides it; what a framework knows comes in as a `Hint`.
"""

from patchkv_agents.context.lineage.index import VersionIndex
from patchkv_agents.context.lineage.parents import Hint, certain_parent, find_parent

__all__ = ["Hint", "VersionIndex", "certain_parent", "find_parent"]
