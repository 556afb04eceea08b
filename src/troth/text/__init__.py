"""Ring 1: text in and out. Knows tokens, templates and strings; knows no tensors, no requests in flight, no HTTP."""
