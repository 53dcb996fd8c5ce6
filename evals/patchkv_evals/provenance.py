"""The machine that figures come from. Part of every results file."""

from __future__ import annotations

import platform
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch

SCHEMA = 1
"""Version of the results files' form."""


def machine(device: torch.device | str = "cpu") -> dict[str, Any]:
    """The processor's name, torch's threads, and the name of the device that the model runs on."""
    device = torch.device(device)
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else device.type
    return {"cpu": cpu_name(), "threads": torch.get_num_threads(), "device": name}


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
