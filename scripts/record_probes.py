"""Records what the probe finds in the published templates: ``python -m scripts.record_probes``.

Look at the difference family by family before keeping it: a family that lost its tools is a bug (``docs/probes.md``).
"""

from __future__ import annotations

import json
import sys

from tests.probe_records import GOLDEN, probe_rows
from tests.shared_data import ROOT


def main() -> int:
    """Write the golden file. Returns the exit code."""
    index = ROOT / "templates" / "INDEX.json"
    if not index.exists():
        print(f"{index} is not here; TROTH_SHARED_DATA names the folder of shared data", file=sys.stderr)
        return 1
    lines = [json.dumps(row, ensure_ascii=False) + "\n" for row in probe_rows(index)]
    GOLDEN.parent.mkdir(exist_ok=True)
    GOLDEN.write_text("".join(lines), encoding="utf-8")
    print(f"{len(lines)} templates recorded in {GOLDEN}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
