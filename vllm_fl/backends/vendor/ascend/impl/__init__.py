# SPDX-License-Identifier: Apache-2.0
"""torch_npu's operators, served behind guards."""
