# SPDX-License-Identifier: Apache-2.0
"""What a vendor's backend looks like: `vllm-fl new-vendor` makes packages of it, and a vendor
inside vllm_fl copies it. It is not registered."""
