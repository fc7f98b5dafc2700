# SPDX-License-Identifier: Apache-2.0
"""CPUs: vLLM's own kernels behind guards (cpu.py, impl), and ours (fl.py, impl_fl)."""
