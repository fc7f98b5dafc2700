# SPDX-License-Identifier: Apache-2.0
"""The key-value cache: the contracts' own reference."""

from __future__ import annotations
