"""Writes what evaluations and benchmarks found as one HTML page and figures.

write_report([Path("results")], Path("report.html"))
"""

from patchkv_evals.report.build import Written, write_report

__all__ = ["Written", "write_report"]
