"""Benchmarks: what recovery costs, and where the time goes. `patchkv bench` runs them.

Each is a module with a configuration, a function that measures, and `COLUMNS` that print what it
found. Points are JSON objects; their fields are described in the module's text. A time `x_ms` is
the median over rounds, and `x_rounds_ms` has the rounds. The sides of a comparison run interleaved
in one process.
"""
