"""Ring 3: the HTTP server. It sees an engine only through ``contracts/ports.py``, and no tensor ever."""
