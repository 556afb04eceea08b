"""Ring 1: options, machine facts, and their resolution into decisions with reasons."""
