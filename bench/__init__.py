"""Benchmarks: ``python -m bench [--only PREFIX]``. Figures of one run on one machine; compare
ratios.
"""
