"""JSON files that a user names: read, or refused in words that say what is wrong with the file.

Refuses to know what is in them. Used by ``warm.py`` and ``cache_transfer.py``.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from troth.errors import OptionError


def read_json(path: Path) -> Any:
    """The value in a file. Raises OptionError, naming the file, and the place where it stops being JSON."""
    try:
        return json.loads(path.read_bytes())
    except FileNotFoundError:
        raise OptionError(f"{path}: there is no such file") from None
    except OSError as error:
        raise OptionError(f"{path}: cannot be read: {error.strerror}") from error
    except json.JSONDecodeError as error:
        place = f"line {error.lineno}, column {error.colno}"
        raise OptionError(f"{path}: is not JSON: {error.msg} at {place}") from error
    except UnicodeDecodeError as error:
        raise OptionError(f"{path}: is not JSON: byte {error.start} is not part of a UTF-8 text") from error
    except (ValueError, RecursionError) as error:
        raise OptionError(f"{path}: is not JSON that can be read: {error}") from error
