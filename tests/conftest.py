"""What every test stands on: 8 virtual CPU devices and one compute thread per worker, set before JAX is imported."""

import atexit
import os
import shutil
import tempfile

os.environ["JAX_PLATFORMS"] = "cpu"
# Compilation is most of what the tests cost; optimising programs that run once only adds to it.
flags = ["--xla_force_host_platform_device_count=8", "--xla_backend_optimization_level=0"]
if "PYTEST_XDIST_WORKER" in os.environ:  # workers share the cores; more threads than cores only get in each other's way
    flags.append("--xla_cpu_multi_thread_eigen=false")
    os.environ["OMP_NUM_THREADS"] = "1"
os.environ["XLA_FLAGS"] = " ".join([os.environ.get("XLA_FLAGS", ""), *flags]).strip()
if "PYTEST_XDIST_WORKER" not in os.environ:  # runs keep compiled programs in the user's cache; tests have their own
    os.environ["XDG_CACHE_HOME"] = tempfile.mkdtemp(prefix="diffjax-tests-")
    atexit.register(shutil.rmtree, os.environ["XDG_CACHE_HOME"], ignore_errors=True)
os.environ.pop("JAX_ENABLE_X64", None)  # 64-bit tests ask for it themselves, with `jax.enable_x64`
