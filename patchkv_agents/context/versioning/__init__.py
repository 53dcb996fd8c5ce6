"""History of a context: operations, branches, blame, forgetting."""
