"""Ring 1: which tokens to compute next, as a replayable state machine over integers.

Imports no torch, reads no clock, draws no random number, starts no thread. Start with ``scheduler.py``.
"""
