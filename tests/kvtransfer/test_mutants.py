"""Each rule of the hand-over is needed: left out of the real classes, the random histories find it."""

import pytest
import structlog
from hypothesis import Phase, settings
from hypothesis.stateful import run_state_machine_as_test

from tests.kvtransfer.mutants import MUTANTS, Mutant
from tests.kvtransfer.test_protocol_stateful import ProtocolMachine

# The first failure is enough.
QUICK = settings(
    max_examples=1000,
    stateful_step_count=40,
    deadline=None,
    derandomize=True,
    database=None,
    phases=[Phase.generate],
    report_multiple_bugs=False,
    print_blob=False,
)


@pytest.mark.parametrize("mutant", MUTANTS.values(), ids=MUTANTS.keys())
def test_a_rule_left_out_is_found(mutant: Mutant, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same machine that passes with the real classes fails, and by the check that the rule is there for."""
    monkeypatch.setattr(mutant.owner, mutant.name, mutant.function)

    machine = type("Machine", (ProtocolMachine,), dict(mutant.focus))

    # What the mutant breaks is logged at length otherwise.
    with structlog.testing.capture_logs(), pytest.raises(AssertionError, match=mutant.found):
        run_state_machine_as_test(machine, settings=QUICK)


def test_each_kind_of_fault_has_its_mutant() -> None:
    """No kind of fault is left without one."""
    assert {mutant.kind for mutant in MUTANTS.values()} == set(range(1, 11))
