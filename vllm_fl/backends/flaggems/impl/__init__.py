# SPDX-License-Identifier: Apache-2.0
"""One file per family; each function carries the name of its op."""
