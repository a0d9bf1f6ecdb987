"""Skips tests of features that torch 2.11, the oldest supported version, lacks. 2.12 was not tested."""

import pytest
import torch

OLD_TORCH = tuple(int(part) for part in torch.__version__.split(".")[:2]) < (2, 13)


def not_with_old_torch(lacks: str) -> pytest.MarkDecorator:
    return pytest.mark.skipif(OLD_TORCH, reason=f"torch {torch.__version__} {lacks}")
