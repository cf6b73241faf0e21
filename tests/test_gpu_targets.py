"""gpu_targets.py: what the compiler is told about GPUs."""

import gpu_targets
import pytest
from gpu_targets import GPUS, gpu_grid

from metrics import PEAK_FLOPS


@pytest.mark.parametrize(("devices", "expected"), [(1, "1x1x1"), (8, "1x1x8"), (64, "1x8x8"), (512, "1x64x8")])
def test_grid(devices, expected):
    """GPUs of one host taken for hosts, whose collectives the compiler would plan over the network."""
    assert gpu_grid(devices) == expected


def test_hosts_are_whole():
    """A plan for 12 GPUs that is one for 8."""
    with pytest.raises(ValueError, match="--topology: got 12 GPUs, expected at most 8 or a multiple of 8"):
        gpu_grid(12)


def test_memory_that_a_program_may_fill(monkeypatch):
    """A step that is said to fit because the last quarter is counted, which JAX leaves alone by default."""
    monkeypatch.delenv("XLA_CLIENT_MEM_FRACTION", raising=False)
    assert {name: gpu.hbm for name, gpu in GPUS.items()} == {"h100": 59.33, "h200": 105.75, "rtx4090": 17.74}
    monkeypatch.setenv("XLA_CLIENT_MEM_FRACTION", "0.92")
    assert GPUS["h100"].hbm == 72.78


@pytest.mark.parametrize("name", GPUS)
def test_target(name):
    """A brace or field that str.format eats; a GPU whose peak nobody knows, so that its plan has no cost."""
    text = GPUS[name].target()
    assert text.count("{") == text.count("}") == 4
    assert f"core_count: {GPUS[name].cores} " in text and f'device_description_str: "{GPUS[name].kind}"' in text
    assert f"shared_memory_per_block_optin: {GPUS[name].shared_block} " in text
    assert GPUS[name].kind in PEAK_FLOPS and gpu_targets.HOST == 8
