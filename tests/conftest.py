"""Shared set-up: the tests run on the CPU, and the source files are imported from the folders above."""

import os
import sys
from pathlib import Path

os.environ["JAX_PLATFORMS"] = "cpu"
# Several fake devices, so that meshes larger than one can be tested; must be set before jax is imported.
os.environ["XLA_FLAGS"] = os.environ.get("XLA_FLAGS", "") + " --xla_force_host_platform_device_count=8"
sys.path[:0] = [str(Path(__file__).resolve().parent.parent / folder) for folder in (".", "bench", "tools")]

import pytest  # noqa: E402
from harness import House  # noqa: E402


@pytest.fixture(scope="session")
def house(tmp_path_factory) -> House:
    return House(tmp_path_factory.mktemp("house"))


@pytest.fixture(scope="session")
def straight(house) -> Path:
    """The run that nothing disturbs."""
    run_dir = house.root / "straight"
    house.run(run_dir)
    return run_dir
