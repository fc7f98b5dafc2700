# SPDX-License-Identifier: Apache-2.0
"""The command `vllm-fl`: one file per command, wired together in main.py."""
