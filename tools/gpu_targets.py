"""NVIDIA GPUs as XLA's compiler describes them, so that tools/plan.py compiles for one on a machine that has none.

Sources: OpenXLA xla/backends/gpu/target_config/specs/h100_sxm.txtpb and h200.txtpb. RTX 4090: NVIDIA's "Ada GPU
Architecture" (cores, clock, L2 cache, bandwidth), the CUDA C++ Programming Guide's table for compute capability 8.9
(threads, shared memory), and the total that out-of-memory messages of torch name (23.65 GiB).
"""

import os
from typing import NamedTuple

HOST = 8  # GPUs of one host
SPEC = """
gpu_device_info {{
  cuda_compute_capability {{ major: {major} minor: {minor} }} core_count: {cores} clock_rate_ghz: {clock}
  memory_bandwidth: {bandwidth} l2_cache_size: {l2} device_memory_size: {memory}
  shared_memory_per_core: {shared_core} shared_memory_per_block_optin: {shared_block} shared_memory_per_block: 49152
  threads_per_core_limit: {threads} threads_per_block_limit: 1024 threads_per_warp: 32 fpus_per_core: 128
  block_dim_limit_x: 2147483647 block_dim_limit_y: 65535 block_dim_limit_z: 65535
  registers_per_core_limit: 65536 registers_per_block_limit: 65536
}}
platform_name: "CUDA" dnn_version_info {{ major: 9 minor: 8 }} runtime_version {{ major: 12 minor: 8 }}
device_description_str: "{kind}"
"""


class Gpu(NamedTuple):
    """A kind of GPU; sizes in bytes, the clock in GHz."""

    kind: str  # JAX's, of a device
    major: int  # compute capability
    minor: int
    cores: int  # streaming multiprocessors
    clock: float
    bandwidth: int
    l2: int
    memory: int
    shared_core: int
    shared_block: int
    threads: int  # of a core
    devices: int = 1  # JAX devices a chip
    mfu: None = None  # nobody has measured one with this code

    @property
    def hbm(self) -> float:
        """GiB that a program may fill: JAX takes three quarters of the memory, unless its variable says otherwise."""
        return round(self.memory / 2**30 * float(os.environ.get("XLA_CLIENT_MEM_FRACTION", "0.75")), 2)

    def target(self) -> str:
        """The text of a GpuTargetConfigProto."""
        return SPEC.format(**self._asdict())


GPUS = {
    "h100": Gpu("NVIDIA H100 80GB HBM3", 9, 0, 132, 1.98, 3_352_320_000_000, 52_428_800, 84_942_979_072, 233_472,
                232_448, 2048),
    "h200": Gpu("NVIDIA H200", 9, 0, 132, 1.98, 4_800_000_000_000, 52_428_800, 151_397_597_184, 233_472, 232_448, 2048),
    "rtx4090": Gpu("NVIDIA GeForce RTX 4090", 8, 9, 128, 2.52, 1_008_000_000_000, 75_497_472, 25_393_692_672, 102_400,
                   101_376, 1536),
}  # fmt: skip


def gpu_grid(devices: int) -> str:
    """How JAX writes so many GPUs: slices x hosts x GPUs of a host. ValueError if they fill no whole hosts."""
    if devices > HOST and devices % HOST:
        raise ValueError(f"--topology: got {devices} GPUs, expected at most {HOST} or a multiple of {HOST}")
    return f"1x{max(1, devices // HOST)}x{min(devices, HOST)}"
