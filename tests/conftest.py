"""Shared set-up: the tests run on the CPU, and the source files are imported from the folder above."""

import os
import sys
from pathlib import Path

os.environ["JAX_PLATFORMS"] = "cpu"
# Several fake devices, so that meshes larger than one can be tested; must be set before jax is imported.
os.environ["XLA_FLAGS"] = os.environ.get("XLA_FLAGS", "") + " --xla_force_host_platform_device_count=8"
sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
