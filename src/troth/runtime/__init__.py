"""Ring 3: engines as processes of their own, spoken to through ``contracts/ports.py``. No torch."""
