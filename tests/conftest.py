"""Devices to test on: the simulated accelerator always, CUDA too where there is one."""

from __future__ import annotations

import pytest
import simulated
import torch
from hypothesis import HealthCheck, settings

settings.register_profile("default", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("default")

ACCELERATORS = ["sim", *(["cuda"] if torch.cuda.is_available() else [])]


@pytest.fixture(params=ACCELERATORS)
def device(request: pytest.FixtureRequest) -> torch.device:
    """An accelerator with real values, resolved."""
    return torch.device(request.param, 0)


@pytest.fixture
def copies() -> simulated.Counter[str]:
    """The copies to, from and on the simulated device, counted from here."""
    simulated.COPIES.clear()
    return simulated.COPIES
