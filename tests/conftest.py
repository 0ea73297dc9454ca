"""What every test stands on: 8 virtual CPU devices and one compute thread per worker, set before JAX is imported."""

import os

os.environ["JAX_PLATFORMS"] = "cpu"
# Compilation is most of what the tests cost; optimising programs that run once only adds to it.
flags = ["--xla_force_host_platform_device_count=8", "--xla_backend_optimization_level=0"]
if "PYTEST_XDIST_WORKER" in os.environ:  # workers share the cores; more threads than cores only get in each other's way
    flags.append("--xla_cpu_multi_thread_eigen=false")
    os.environ["OMP_NUM_THREADS"] = "1"
os.environ["XLA_FLAGS"] = " ".join([os.environ.get("XLA_FLAGS", ""), *flags]).strip()
os.environ.pop("JAX_ENABLE_X64", None)  # 64-bit tests ask for it themselves, with `jax.enable_x64`
