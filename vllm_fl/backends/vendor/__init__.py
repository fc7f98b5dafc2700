# SPDX-License-Identifier: Apache-2.0
"""Vendors: one folder each, all of the same shape."""
