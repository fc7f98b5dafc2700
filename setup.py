# SPDX-License-Identifier: Apache-2.0
from setuptools import setup

# Native extensions are declared here; everything else is in pyproject.toml.
setup()
