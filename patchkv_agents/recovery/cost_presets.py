"""Models and machines of the published setting, for `patchkv plan-cost`."""

from __future__ import annotations

from collections.abc import Mapping

from patchkv_agents.recovery.costs import DeviceCost, ModelCost

_PREFILL_EFFICIENCY = 0.5
"""Share of peak FLOPs that a prefill through Transformers is taken to sustain: an assumption."""
_TRANSFER_EFFICIENCY = 0.8
"""Share of the nominal PCIe rate that copies from pinned memory are taken to reach: another."""
_OVERHEAD_S = 0.010
"""Launching some hundred kernels and one sampling step: another."""


def _gpu(name: str, *, tera_flops: float, memory_gb_s: float, pcie_gb_s: float) -> DeviceCost:
    return DeviceCost(
        name,
        flops_per_s=tera_flops * 1e12 * _PREFILL_EFFICIENCY,
        memory_bytes_per_s=memory_gb_s * 1e9,
        transfer_bytes_per_s=pcie_gb_s * 1e9 * _TRANSFER_EFFICIENCY,
        overhead_s=_OVERHEAD_S,
    )


DEVICES: Mapping[str, DeviceCost] = {
    # Dense 16-bit peak, memory and one direction of PCIe x16, from NVIDIA's data sheets.
    "a800": _gpu("A800 80GB", tera_flops=312, memory_gb_s=2039, pcie_gb_s=32),
    "h200": _gpu("H200", tera_flops=989, memory_gb_s=4800, pcie_gb_s=64),
}
"""Machines by name; one GPU each. Layers spread over several compute one after the other."""


MODELS: Mapping[str, ModelCost] = {
    # From the models' own configuration files.
    "qwen3-32b": ModelCost.of_sizes(
        "Qwen3-32B",
        layers=64,
        hidden=5120,
        heads=64,
        kv_heads=8,
        head_dim=128,
        width=25600,
        vocabulary=151936,
    ),
    "glm-4-9b": ModelCost.of_sizes(
        "GLM-4-9B",
        layers=40,
        hidden=4096,
        heads=32,
        kv_heads=2,
        head_dim=128,
        width=13696,
        vocabulary=151552,
    ),
    "llama-3.3-70b": ModelCost.of_sizes(
        "Llama-3.3-70B",
        layers=80,
        hidden=8192,
        heads=64,
        kv_heads=8,
        head_dim=128,
        width=28672,
        vocabulary=128256,
    ),
}
"""Models by name."""
