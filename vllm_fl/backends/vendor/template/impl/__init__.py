# SPDX-License-Identifier: Apache-2.0
"""The vendor's functions, one file per family."""
