# SPDX-License-Identifier: Apache-2.0
"""Plain PyTorch: the meaning of each op, on any device."""
