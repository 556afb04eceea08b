"""Ring 2: turning plans into tensors, tokens and events. Start with ``engine.py``, then ``runner.py``."""
