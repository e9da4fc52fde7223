"""Peak arithmetic of known devices: dense bf16 matrix TFLOP/s, from the makers' data sheets.

Only what MFU divides by. fp32 training runs on other units at other rates, so there MFU is reported only where
`logging.peak_tflops` says what to divide by.
"""

from __future__ import annotations

import torch

from orthros_train.config import Config

# The first entry whose words all occur in the device's name counts.
BF16_DENSE_TFLOPS: tuple[tuple[str, float], ...] = (
    ("B200", 2250.0),
    ("GH200", 989.4),
    ("H200 NVL", 835.5),
    ("H200", 989.4),
    ("H100 NVL", 835.5),
    ("H100 PCIe", 756.0),
    ("H100", 989.4),
    ("H800", 989.4),
    ("H20", 148.0),
    ("A100", 311.9),
    ("A800", 311.9),
    ("A30", 165.0),
    ("A40", 149.7),
    ("A10", 125.0),
    ("L40S", 362.0),
    ("L4", 121.0),
    ("RTX 4090", 165.2),
)


def peak_flops(config: Config, device: torch.device) -> float | None:
    """Peak FLOP/s of one device, or None where it is unknown."""
    if config.logging.peak_tflops is not None:
        return config.logging.peak_tflops * 1e12
    if device.type != "cuda" or config.precision != "bf16":
        return None
    return known_peak_flops(torch.cuda.get_device_name(device))


def known_peak_flops(name: str) -> float | None:
    """Peak FLOP/s of the device called `name` in the table above, or None."""
    words = name.split()
    for wanted, tflops in BF16_DENSE_TFLOPS:
        if all(any(word == part or word.startswith(f"{part}-") for word in words) for part in wanted.split()):
            return tflops * 1e12
    return None
