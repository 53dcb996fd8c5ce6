"""Kernels of PatchKV Agents: move KV rows between a live cache and stored payloads.

Each Triton kernel has a torch path beside it; the functions here choose by device.
"""

from patchkv_kernels.attention_mass import add_block_mass, add_received_mass
from patchkv_kernels.errors import PayloadError
from patchkv_kernels.gather import quantize_gather
from patchkv_kernels.payload import Payload, PayloadFormat
from patchkv_kernels.rotary import Rope, RopeLayout, rotate_keys
from patchkv_kernels.row_moves import RowMoves
from patchkv_kernels.scatter import dequantize_scatter, scatter_rows

__all__ = [
    "Payload",
    "PayloadError",
    "PayloadFormat",
    "Rope",
    "RopeLayout",
    "RowMoves",
    "add_block_mass",
    "add_received_mass",
    "dequantize_scatter",
    "quantize_gather",
    "rotate_keys",
    "scatter_rows",
]
