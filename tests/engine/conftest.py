"""Settings of torch for small tests."""

import pytest


@pytest.fixture(autouse=True, scope="package")
def one_thread() -> None:
    """Tiny tensors are slower on many threads, and much slower beside other tests."""
    import torch  # noqa: PLC0415 - the scheduler's tests do not need it, but they stand beside those that do

    torch.set_num_threads(1)
