"""One engine on one model: time to first token, tokens per second alone and together, memory, against the floor."""
