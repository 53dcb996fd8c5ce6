"""Question-answering data sets, read into one form.

    loaded = load_rows("hotpot_dev_distractor_v1.json", "hotpotqa", limit=100)
    print(loaded.report())  # how many rows, and what was left out and why
    loaded.rows[0].question, loaded.rows[0].answers, loaded.rows[0].passages

Data of one's own: one JSON object a line, in the form that `patchkv_evals.datasets.normalised`
describes.
"""

from patchkv_evals.datasets.loading import DATASETS, load_hub, load_rows
from patchkv_evals.datasets.rows import LoadedRows, Passage, QARow, Skipped, SupportingFact

__all__ = [
    "DATASETS",
    "LoadedRows",
    "Passage",
    "QARow",
    "Skipped",
    "SupportingFact",
    "load_hub",
    "load_rows",
]
