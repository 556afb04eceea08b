"""Ring 0: the types every other ring agrees on. Standard library only; imports nothing but ``troth.errors``."""
