"""What a user may do who may not do all."""

import os
from contextlib import contextmanager

import pytest


@contextmanager
def without_rights():
    """As a user who is not root, whom nothing is refused."""
    if os.geteuid() != 0:
        yield
        return
    try:
        os.seteuid(65534)
    except OSError:
        pytest.skip("this root cannot become another user")
    try:
        yield
    finally:
        os.seteuid(0)
