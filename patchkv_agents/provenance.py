"""Where figures come from: versions, the command, the time. Part of every file of results."""

from __future__ import annotations

import os
import platform
import re
import shlex
import sys
from datetime import datetime, timezone
from importlib.metadata import version

from patchkv_agents import __version__


def versions() -> dict[str, str]:
    """Versions of this package, Python, torch and transformers."""
    import torch

    return {
        "patchkv_agents": __version__,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": version("transformers"),
    }


def command_line() -> str:
    """The command that this process runs, as it would be typed, without its folder."""
    program = os.path.basename(sys.argv[0])
    return without_passwords(shlex.join([program, *sys.argv[1:]]))


def without_passwords(text: str) -> str:
    """`text` with user and password cut out of every address in it."""
    return re.sub(r"//[^/\s]+@", "//...@", text)


def created() -> str:
    """The time in UTC, as `2031-01-21T17:41:05Z`."""
    return datetime.now(timezone.utc).strftime("%Y-%m-%dT%H:%M:%SZ")
