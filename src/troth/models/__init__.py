"""Ring 2: model families, one file each, named after ``model_type``. Start with ``llama.py``; all: ``registry.py``."""
