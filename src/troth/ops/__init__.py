"""Ring 2: numeric operations. One file per op: signature, reference, tolerances, shape grid. Start with
``registry.py``.
"""
