"""Measure an artifact beside its peers, on the same texts, in the same run.

Every figure is the median of several runs after a warm-up. Peers get the best of several batch sizes; their
attention is SDPA and their dtype is the artifact's.
"""

from toolkit.bench.measure import run_bench
from toolkit.bench.report import BenchResult, Measurement
from toolkit.bench.suite import SuiteResult, run_suite
from toolkit.bench.texts import lognormal_lengths, random_texts

__all__ = [
    "BenchResult",
    "Measurement",
    "SuiteResult",
    "lognormal_lengths",
    "random_texts",
    "run_bench",
    "run_suite",
]
