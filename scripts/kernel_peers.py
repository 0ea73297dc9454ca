"""Other programs for the same scan, each in a process of its own that times one call whenever it is told to.

    torch    the minimal chunked form of Mamba-2 (arXiv 2405.21060, listing 1) in PyTorch, by any Python that has it:
             four products a chunk, a matrix of decays passes states between chunks, all heads share their scores
    former   `ssd_scan` of another checkout of this project, its XLA form at its automatic chunk

bench_kernels.py and bench_gpu.py start them through `Peer`. Requests and answers are JSON lines; a request is the sizes
of `ssd_inputs` and the keys that `Peer` adds. Inputs and programs are made at a case's first request.
"""

import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np


def ssd_inputs(B: int, L: int, H: int, P: int, N: int) -> list[np.ndarray]:
    """x [B, L, H, P], dt [B, L, H], A [H], Bm, Cm [B, L, N] and the cotangent of y, float32: one document a row."""
    rng = np.random.default_rng(0)
    normal = lambda *shape: rng.standard_normal(shape, np.float32)
    uniform = lambda low, high, *shape: rng.uniform(low, high, shape).astype(np.float32)
    x, dt, A = normal(B, L, H, P), uniform(1e-3, 0.1, B, L, H), -uniform(1, 16, H)
    return [x, dt, A, normal(B, L, N), normal(B, L, N), normal(B, L, H, P)]


class Peer:
    """The process of a peer. Where it cannot start `ready` is false, and `about` says why."""

    def __init__(self, kind: str, python: str, checkout: str | None = None):
        self.kind, self.python, self.checkout = kind, python, checkout

    def __enter__(self) -> "Peer":
        environment = os.environ | ({"PYTHONPATH": self.checkout} if self.checkout else {})
        self.noise = tempfile.TemporaryFile("w+")
        self.process = subprocess.Popen(
            [self.python, __file__, self.kind],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self.noise, text=True, env=environment,
        )  # fmt: skip
        first = self.process.stdout.readline()
        self.ready = bool(first)
        self.about = json.loads(first)["about"] if first else f"left out, it does not start: {self._last_noise()}"
        return self

    def __exit__(self, *_) -> None:
        self.process.stdin.close()
        self.process.wait()
        self.noise.close()

    def seconds(self, request: dict, calls: int = 3) -> float:
        """Of one call."""
        return self._ask(request | {"calls": calls})["seconds"]

    def results(self, request: dict) -> list[np.ndarray]:
        """y and, for a request with "backward", the gradients of x, dt, A, Bm, Cm."""
        with tempfile.TemporaryDirectory() as folder:
            path = str(Path(folder) / "results.npz")
            self._ask(request | {"calls": 0, "save": path})
            with np.load(path) as arrays:
                return [arrays[name] for name in arrays.files]

    def _ask(self, request: dict) -> dict:
        print(json.dumps(request), file=self.process.stdin, flush=True)
        line = self.process.stdout.readline()
        answer = json.loads(line) if line else {"error": f"the process died: {self._last_noise()}"}
        if "error" in answer:
            raise RuntimeError(f"{self.kind}: {answer['error']}")
        return answer

    def _last_noise(self) -> str:
        self.noise.seek(0)
        return (self.noise.read().strip().splitlines() or ["it said nothing"])[-1]


# In the process. A peer is what it says about itself, `program(request)`, a function without arguments that starts one
# call, `wait(results)`, and `to_numpy(result)`.


def former_peer():
    import jax
    import jax.numpy as jnp

    import diffjax
    from diffjax.kernels import ssd_scan

    def program(request):
        *inputs, cotangent = map(jnp.asarray, ssd_inputs(*(request[key] for key in "BLHPN")))
        scan = lambda x, dt, A, Bm, Cm: ssd_scan(
            x, dt, A, Bm[:, :, None], Cm[:, :, None], block_size=request["G"], backend="xla"
        )[0]

        @jax.jit
        def both(inputs, cotangent):
            y, pull = jax.vjp(scan, *inputs)
            return y, *pull(cotangent)

        forward = jax.jit(lambda inputs, cotangent: (scan(*inputs),))
        run = both if request["backward"] else forward
        return lambda: run(inputs, cotangent)

    return f"{Path(diffjax.__file__).parent.parent}", program, jax.block_until_ready, np.asarray


def torch_peer():
    import torch
    import torch.nn.functional as F

    device = "cuda" if torch.cuda.is_available() else "cpu"

    def decays_between(a):
        """exp of the sum of a [..., Q] over (j, i] for j <= i, else 0: [..., Q, Q]."""
        total = a.cumsum(-1)
        later = torch.ones(a.shape[-1], a.shape[-1], dtype=torch.bool, device=device).tril()
        return (total[..., :, None] - total[..., None, :]).masked_fill(~later, -torch.inf).exp()

    def chunked(x, dt, A, Bm, Cm, chunk):
        B, T, H, P = x.shape
        split = lambda array: array.reshape(B, T // chunk, chunk, *array.shape[2:])
        u, Bm, Cm = split(x * dt[..., None].to(x.dtype)), split(Bm), split(Cm)
        a = split(dt * A).permute(0, 3, 1, 2)  # [B, H, C, Q]
        total = a.cumsum(-1)
        inside = torch.einsum("bcin,bcjn->bcij", Cm, Bm)[:, None] * decays_between(a).to(x.dtype)
        y = torch.einsum("bhcij,bcjhp->bcihp", inside, u)
        to_end = (total[..., -1:] - total).exp().to(x.dtype)
        added = torch.einsum("bcjn,bcjhp->bchpn", Bm, u * to_end.permute(0, 2, 3, 1)[..., None])
        added = torch.cat([torch.zeros_like(added[:, :1]), added], dim=1)
        between = decays_between(F.pad(total[..., -1], (1, 0))).to(x.dtype)
        states = torch.einsum("bhzc,bchpn->bzhpn", between, added)[:, :-1]
        y = y + torch.einsum("bcin,bchpn->bcihp", Cm, states) * total.exp().to(x.dtype).permute(0, 2, 3, 1)[..., None]
        return y.reshape(B, T, H, P)

    def program(request):
        x, dt, A, *others = (torch.from_numpy(array).to(device) for array in ssd_inputs(*(request[k] for k in "BLHPN")))
        x, Bm, Cm, cotangent = (array.to(getattr(torch, request["dtype"])) for array in (x, *others))
        inputs = [x, dt, A, Bm, Cm]

        def run():
            if not request["backward"]:
                with torch.no_grad():
                    return (chunked(*inputs, request["chunk"]),)
            leaves = [array.requires_grad_() for array in inputs]
            y = chunked(*leaves, request["chunk"])
            return y, *torch.autograd.grad(y, leaves, cotangent)

        return run

    wait = lambda results: torch.cuda.synchronize() if device == "cuda" else None
    to_numpy = lambda array: array.detach().float().cpu().numpy()
    return f"torch {torch.__version__}, {device}, {torch.get_num_threads()} threads", program, wait, to_numpy


def main() -> None:
    about, program, wait, to_numpy = {"former": former_peer, "torch": torch_peer}[sys.argv[1]]()
    programs = {}
    print(json.dumps({"about": about}), flush=True)
    for line in sys.stdin:
        request = json.loads(line)
        calls, save = request.pop("calls"), request.pop("save", None)
        key = json.dumps(request, sort_keys=True)
        try:
            if key not in programs:
                programs[key] = program(request)
                for _ in range(2):
                    wait(programs[key]())
            if save:
                np.savez(save, *map(to_numpy, programs[key]()))
            wait(programs[key]())  # the clock starts when this process has its threads and the cores to itself
            began = time.perf_counter()
            for _ in range(calls):
                results = programs[key]()
            if calls:
                wait(results)
            answer = {"seconds": (time.perf_counter() - began) / max(calls, 1)}
        except Exception as error:  # the other side says why the case is left out
            answer = {"error": f"{type(error).__name__}: {str(error)[:300]}"}
        print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    main()
