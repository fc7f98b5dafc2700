# SPDX-License-Identifier: Apache-2.0
"""Our own CPU kernels; what they cannot take their guards refuse."""
