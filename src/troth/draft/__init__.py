"""Who proposes tokens, and how many of them pay. Nothing here changes an answer, and nothing imports torch.

Read next: ``contracts/speculation.py`` (the port), ``drafter.py`` (one request), ``run/drafting.py`` (an engine).
"""
