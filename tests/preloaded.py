"""Modules that processes of tests need. Their server imports them once, before it forks them.

The processes flush no files: no test cuts the power.
"""

import os

import pytest  # noqa: F401
import torch._dynamo  # noqa: F401

from tests import ranks  # noqa: F401
from tests.faults import harness  # noqa: F401

os.fsync = lambda fd: None
