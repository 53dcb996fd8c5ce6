"""From messages to tokens: chat templates, spans, sampled ids, hosted models."""
