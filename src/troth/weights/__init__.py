"""Ring 2: an artifact's bytes as tensors. Models take theirs from ``source.py`` and nowhere else."""
