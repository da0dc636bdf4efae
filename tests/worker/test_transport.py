"""By which ways a worker's blocks may go."""

import pytest

from paceline.worker.transport import wants_nixl


@pytest.mark.parametrize("is_installed", [True, False])
def test_what_does_not_encrypt_has_to_be_asked_for(is_installed: bool) -> None:
    """NIXL is taken by itself where it is there, and in a cluster with certificates only by its name."""
    assert wants_nixl("auto", is_installed=is_installed, must_encrypt=False) == is_installed
    assert not wants_nixl("auto", is_installed=is_installed, must_encrypt=True)
    for must_encrypt in (False, True):
        assert wants_nixl("nixl", is_installed=is_installed, must_encrypt=must_encrypt)
        assert not wants_nixl("grpc", is_installed=is_installed, must_encrypt=must_encrypt)
        assert not wants_nixl("shm", is_installed=is_installed, must_encrypt=must_encrypt)
