"""Model runners: what the engine asks of a model, one folder for each library that runs it."""
