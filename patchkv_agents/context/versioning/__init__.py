"""The history of a context: operations, branches, blame, forgetting."""
