"""Ring 2: where keys, values and recurrent states lie. Who owns which block is decided in ``schedule/``."""
