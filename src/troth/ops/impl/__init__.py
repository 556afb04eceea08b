"""Providers of ops: one module per provider and op, imported by ``registry.activate`` alone."""
