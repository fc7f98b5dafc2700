# SPDX-License-Identifier: Apache-2.0
"""Logits on their way to a sampled token: the contracts' own reference."""

from __future__ import annotations
