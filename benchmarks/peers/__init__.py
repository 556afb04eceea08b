"""Troth beside other engines, interleaved in one run. Peers live in their own virtual environment
(``--peer-python``).
"""
