"""What has to be settled before TensorFlow is imported, for every test."""

import os

# One thread each: no sum is cut differently from run to run, and the peak of a step does not depend
# on the scheduler.
os.environ["TF_NUM_INTEROP_THREADS"] = "1"
os.environ["TF_NUM_INTRAOP_THREADS"] = "1"
os.environ["TF_CPU_ALLOCATOR_USE_BFC"] = "1"
# By default it depends on the processor which kernels there are, and what they need.
os.environ.setdefault("TF_ENABLE_ONEDNN_OPTS", "0")
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
os.environ.setdefault("CUDA_VISIBLE_DEVICES", "-1")

import pytest


def pytest_configure(config: pytest.Config) -> None:
    # A step that could not be planned only warns, and then trains right.
    config.addinivalue_line("filterwarnings", "error::tf_echo.EchoWarning")


# Files of few tests that take long begin, so that no process waits for another at the end.
_FIRST = ("test_tfrs.py", "test_example.py", "test_recommend_movies.py", "test_soak.py")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    items.sort(key=lambda item: item.path.name not in _FIRST)
