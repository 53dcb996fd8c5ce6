"""Where figures come from: the machine, the versions, the command. Part of every results file."""

from __future__ import annotations

import os
import platform
import re
import shlex
import subprocess
import sys
from datetime import datetime, timezone
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

from patchkv_agents import __version__

SCHEMA = 1
"""Version of the results files' form."""


def machine(device: torch.device | str = "cpu") -> dict[str, Any]:
    """The processor's name, torch's threads, and the name of the device that the model runs on."""
    device = torch.device(device)
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else device.type
    return {"cpu": cpu_name(), "threads": torch.get_num_threads(), "device": name}


def versions() -> dict[str, str]:
    """Versions of this package, Python, torch and transformers."""
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


def cpu_name() -> str:
    """What the processor calls itself, else the architecture."""
    info = Path("/proc/cpuinfo")
    if info.is_file():
        for line in info.read_text(errors="replace").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    elif sys.platform == "darwin":
        found = subprocess.run(
            ["sysctl", "-n", "machdep.cpu.brand_string"], capture_output=True, text=True
        )
        if found.stdout.strip():
            return found.stdout.strip()
    return platform.processor() or platform.machine()
