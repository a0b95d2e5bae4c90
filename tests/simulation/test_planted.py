"""The faults that are planted still fit the gateway."""

import pytest

from tests.simulation.planted import FAULTS, ROOT, Planted


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.name)
def test_what_a_fault_replaces_occurs_once(fault: Planted) -> None:
    assert (ROOT / "gateway" / fault.file).read_text().count(fault.before) == 1
    assert fault.after != fault.before


def test_faults_have_names_of_their_own() -> None:
    assert len({fault.name for fault in FAULTS}) == len(FAULTS)
