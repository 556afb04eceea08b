"""``python -m troth``: the command line, where the ``troth`` script is not on the path. Read next: ``cli/main.py``."""

import sys

from troth.cli.main import main

sys.exit(main())
