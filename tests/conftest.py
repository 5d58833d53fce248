"""Every test starts from the same random numbers and uses one thread, whatever ran before it or runs beside it."""

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch is imported: for the processes that tests start, too

import pytest
import torch
from hypothesis import settings

settings.register_profile("untimed", deadline=None)  # how long an example takes is the machine's business
settings.load_profile("untimed")

MOST_WORKERS, MEMORY_OF_A_WORKER = 8, 3 * 2**30

# What takes longest is begun first, so that no worker is left alone with a long file at the end.
LONGEST = (
    "test_sweep_ray",
    "test_flow_zoo",
    "test_train_ddp",
    "test_imagenet_recipes",
    "test_meta_plan",
    "test_budget",
    "test_engine_resume",
    "test_sharded",
    "test_flow_fuzz",
    "test_docs",
    "test_flow_norms",
    "test_compare",
    "test_integrations",
    "test_engine_options",
    "test_gated_models",
    "test_examples_more",
)


def same_start():
    torch.manual_seed(0)
    torch.set_num_threads(1)


@pytest.fixture(autouse=True, scope="module")
def same_start_for_every_module():
    """For fixtures that a module's tests share, which are made before the first test starts."""
    same_start()


@pytest.fixture(autouse=True)
def same_start_for_every_test():
    same_start()


def pytest_collectstart(collector):
    """What a test module makes while it is imported, such as layers to choose from, is the same every time."""
    if isinstance(collector, pytest.Module):
        torch.manual_seed(0)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_auto_num_workers():
    """The workers of ``make test``: one a core, as far as memory goes."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, min(cores, MOST_WORKERS, memory() // MEMORY_OF_A_WORKER))


def memory():
    try:
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (AttributeError, OSError, ValueError):  # not on Windows
        return 2 * MEMORY_OF_A_WORKER


def pytest_collection_modifyitems(items):
    if "PYTEST_XDIST_WORKER" in os.environ:
        rank = {name: place for place, name in enumerate(LONGEST)}
        items.sort(key=lambda item: rank.get(item.path.stem, len(rank)))
