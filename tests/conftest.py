"""Every test starts from the same random numbers and uses one thread."""

import pytest
import torch


@pytest.fixture(autouse=True)
def same_start_for_every_test():
    torch.manual_seed(0)
    torch.set_num_threads(1)


def pytest_collectstart(collector):
    """What a test module makes while it is imported, such as layers to choose from, is the same every time."""
    if isinstance(collector, pytest.Module):
        torch.manual_seed(0)
