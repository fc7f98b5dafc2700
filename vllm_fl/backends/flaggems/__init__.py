# SPDX-License-Identifier: Apache-2.0
"""FlagGems: Triton kernels for chips of many vendors, taken operator by operator."""
