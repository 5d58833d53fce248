"""Every test starts from the same random numbers and uses one thread."""

import pytest
import torch


@pytest.fixture(autouse=True)
def same_start_for_every_test():
    torch.manual_seed(0)
    torch.set_num_threads(1)
