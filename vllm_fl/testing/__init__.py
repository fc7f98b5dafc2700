# SPDX-License-Identifier: Apache-2.0
"""The conformance kit: does an implementation do what its op's contract says?"""

from __future__ import annotations

from .compare import error_in_ulps, exact_outputs, outputs_of, worst_errors

__all__ = ["error_in_ulps", "exact_outputs", "outputs_of", "worst_errors"]
