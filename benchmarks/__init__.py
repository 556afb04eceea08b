"""Measurements, gated by tests and read against a ceiling. Run one with ``python -m benchmarks.NAME``; see
``lib.py``.
"""
