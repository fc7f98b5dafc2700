# SPDX-License-Identifier: Apache-2.0
"""Our own GPU kernels; what they cannot take their guards refuse."""
