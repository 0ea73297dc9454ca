"""The two operations that mix tokens, usable on their own: the state-space scan (SSD) and interval attention.

Each has one public function per caller, one plain reference and faster backends with the same signature.
"""

from diffjax.kernels.attention import block_attention
from diffjax.kernels.ssd import Boundary, final_state, ssd_block, ssd_frontier, ssd_scan, states_at

__all__ = ["Boundary", "block_attention", "final_state", "ssd_block", "ssd_frontier", "ssd_scan", "states_at"]
