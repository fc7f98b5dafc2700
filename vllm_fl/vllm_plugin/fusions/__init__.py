# SPDX-License-Identifier: Apache-2.0
"""Modules of vLLM's models in which one op does what several layers do, one file per op.

`forms` reads sources and needs nothing but Python; `serve` binds what it recognised.
"""
