"""Fakes that ship to users: engines, tokenizers and runners without a model. They keep the real contracts."""
