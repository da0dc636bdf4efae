"""Who waits, in the order of their turn."""

import random

from paceline.core.block_hash import chain_root
from paceline.core.request import Priority
from paceline.engine.block_pool import BlockPool
from paceline.engine.block_tables import SequenceBlocks
from paceline.engine.fairness import Account, Accounts
from paceline.engine.policies import first_come_first_served
from paceline.engine.sequence import Sequence, SequenceRole
from paceline.engine.waiting import WaitingQueue
from tests.engine.timed import NoMemory
from tests.factories import make_spec

POOL = BlockPool(4, 4)


class Line:
    """A queue, and the accounts of those in it."""

    def __init__(self) -> None:
        self.queue = WaitingQueue(first_come_first_served)
        self.accounts: dict[str, Account] = {}
        self.num_made = 0

    def make(
        self, name: str, arrival_s: float, priority: Priority = Priority.STANDARD, tenant: str = ""
    ) -> Sequence:
        """A sequence that does not wait yet."""
        self.num_made += 1
        return Sequence(
            spec=make_spec(name, priority=priority, tenant=tenant),
            role=SequenceRole.GENERATE,
            root=chain_root(b"", ""),
            blocks=SequenceBlocks(POOL, NoMemory()),
            account=self.accounts.setdefault(tenant, Account(tenant)),
            eos_token_ids=frozenset(),
            number=self.num_made,
            arrival_s=arrival_s,
        )

    def add(
        self, name: str, arrival_s: float, priority: Priority = Priority.STANDARD, tenant: str = ""
    ) -> Sequence:
        """One more that waits."""
        sequence = self.make(name, arrival_s, priority, tenant)
        self.queue.add(sequence, arrival_s)
        return sequence

    def names(self) -> list[str]:
        """Whose turn it is, all the way."""
        return [sequence.sequence_id.request_id for sequence in self.in_turn()]

    def aged(self, arrived_by_s: float) -> dict[str, float]:
        """Who has its turn by age, and since when its class or tenant waits."""
        turns = self.queue.by_age(arrived_by_s)
        return {sequence.sequence_id.request_id: since_s for since_s, sequence, _ in turns}

    def in_turn(self) -> list[Sequence]:
        """Class after class."""
        return [sequence for priority in Priority for sequence in self.queue.in_turn(priority)]


def test_classes_come_in_order_and_arrival_counts_within_one() -> None:
    """Whatever the order of coming."""
    line = Line()
    for number, priority in enumerate((Priority.BATCH, Priority.REALTIME, Priority.STANDARD) * 2):
        line.add(f"{priority.name[0]}{number}", number, priority)
    assert line.names() == ["R1", "R4", "S2", "S5", "B0", "B3"]
    assert [line.queue.num_waiting(priority) for priority in Priority] == [2, 2, 2]


def test_whoever_was_sent_back_comes_first_in_its_class() -> None:
    """The last one to lose its blocks before the others, and all of them before those that have not started."""
    line = Line()
    line.add("new", 0.0)
    for name in ("first", "second"):
        line.queue.add_first(line.make(name, 1.0))
    line.add("urgent", 2.0, Priority.REALTIME)
    assert line.names() == ["urgent", "second", "first", "new"]


def test_the_tenant_that_was_served_least_is_next() -> None:
    """Also when that changes while one looks."""
    line = Line()
    for number in range(3):
        line.add(f"a{number}", number, tenant="a")
        line.add(f"b{number}", 10 + number, tenant="b")
    line.accounts["a"].service = 5.0
    turns = line.queue.in_turn(Priority.STANDARD)
    names = []
    for sequence in turns:
        names.append(sequence.sequence_id.request_id)
        line.queue.remove(sequence)
        sequence.account.service += 4
    assert names == ["b0", "b1", "a0", "b2", "a1", "a2"]
    assert len(line.queue) == 0


def test_a_class_in_which_somebody_has_waited_for_long_has_a_turn_by_age() -> None:
    """Not REALTIME; and in it whoever's turn it is, such as one that was sent back."""
    line = Line()
    line.add("urgent", 0.0, Priority.REALTIME)
    line.add("batch", 1.0, Priority.BATCH)
    line.add("standard", 3.0)
    line.add("later", 4.0)
    for priority in Priority:
        line.queue.note_turn("", priority, 10.0)
    assert line.aged(0.9) == {}
    assert line.aged(1.0) == {"batch": 1.0}
    assert line.aged(9.0) == {"standard": 3.0, "batch": 1.0}
    line.queue.add_first(line.make("back", 2.0))
    assert line.aged(9.0) == {"back": 2.0, "batch": 1.0}


def test_a_tenant_of_which_nobody_came_in_for_long_has_its_turn_by_age() -> None:
    """Of each class the one that has waited for longest, however much it was served, also in REALTIME."""
    line = Line()
    for priority in (Priority.REALTIME, Priority.STANDARD):
        for number, tenant in enumerate(("a", "b")):
            line.add(f"{tenant}{priority.name[0]}", number, priority, tenant)
    line.accounts["a"].service = 1000.0
    assert line.aged(5.0) == {"aR": 0.0, "aS": 0.0}
    line.queue.note_turn("a", Priority.STANDARD, 7.0)
    assert line.aged(5.0) == {"aR": 0.0, "bS": 1.0}


def test_the_oldest_urgent_one_has_not_had_a_turn() -> None:
    """A batch request is not urgent, and neither is one that was sent back."""
    line = Line()
    assert line.queue.oldest_urgent_s() is None
    line.add("batch", 0.0, Priority.BATCH)
    assert line.queue.oldest_urgent_s() is None
    standard = line.add("standard", 11.0)
    line.add("urgent", 12.0, Priority.REALTIME)
    assert line.queue.oldest_urgent_s() == 11.0
    line.queue.remove(standard)
    line.queue.add_first(standard)
    assert line.queue.oldest_urgent_s() == 12.0


def test_batch_that_has_begun_is_of_the_next_class() -> None:
    """Preempted, begun by an earlier attempt, or with its prompt computed elsewhere: it is not turned away with the others."""
    line = Line()
    fresh = line.make("fresh", 0.0, Priority.BATCH)
    preempted, moved = (line.make(name, 1.0, Priority.BATCH) for name in ("preempted", "moved"))
    preempted.num_preemptions, moved.role = 1, SequenceRole.AWAIT_KV
    for sequence in (fresh, preempted, moved):
        line.queue.add(sequence, sequence.arrival_s)
    assert line.names() == ["preempted", "moved", "fresh"]
    assert line.queue.of_class(Priority.BATCH) == [fresh]
    assert line.queue.num_waiting(Priority.BATCH) == 3


def test_random_lines_are_in_order() -> None:
    """Adds and removals in any order: sorted by class, and by arrival within one of a single tenant; counts are right."""
    rng = random.Random(3)
    line = Line()
    waiting: list[Sequence] = []
    for step in range(600):
        if rng.random() < 0.6:
            waiting.append(line.add(f"r{step}", step / 10, rng.choice(list(Priority))))
        elif waiting:
            line.queue.remove(waiting.pop(rng.randrange(len(waiting))))
        order = [(each.turn_class, each.arrival_s) for each in line.in_turn()]
        assert order == sorted(order)
        assert len(order) == len(waiting) == sum(map(line.queue.num_waiting, Priority))


STANDARD = Priority.STANDARD


def test_accounts_are_forgotten_when_nobody_owes_anything() -> None:
    """Tenants come and go by the thousand, while one has somebody here: those that are level with who waits leave nothing."""
    accounts = Accounts()
    stays = accounts.enter("stays")
    accounts.join(stays, STANDARD)
    for number in range(1000):
        account = accounts.enter(f"t{number}")
        accounts.join(account, STANDARD)
        account.service += 10
        accounts.quit(account, STANDARD)
        accounts.leave(account)
        stays.service += 20
    assert len(accounts.services()) <= 2
    accounts.quit(stays, STANDARD)
    assert accounts.services().keys() == {"stays"}
    accounts.leave(stays)
    assert accounts.services() == {}


def test_accounts_are_forgotten_where_nobody_ever_waits_for_long() -> None:
    """However much they were served: nobody is there to whom anything could be owed."""
    accounts = Accounts()
    accounts.enter("pinned")
    for number in range(1000):
        account = accounts.enter(f"t{number}")
        accounts.join(account, STANDARD)
        accounts.quit(account, STANDARD)
        account.service += 10
        accounts.leave(account)
    assert accounts.services().keys() == {"pinned"}


def test_a_tenant_that_leaves_in_debt_comes_back_in_debt() -> None:
    """Leaving for a moment does not wash off what it has used more than one that waits."""
    accounts = Accounts()
    quiet, noisy = accounts.enter("quiet"), accounts.enter("noisy")
    accounts.join(quiet, STANDARD)
    noisy.service = 100
    accounts.leave(noisy)
    noisy = accounts.enter("noisy")
    accounts.join(noisy, STANDARD)
    assert noisy.service == 100


def test_who_joins_a_line_starts_level_with_those_in_it() -> None:
    """Not with those that only run, nor with those of another class while there are some in its own."""
    accounts = Accounts()
    running, standard, batch, new, late = map(accounts.enter, ("running", "standard", "batch", "new", "late"))
    for account, service, priority in ((batch, 20, Priority.BATCH), (standard, 50, STANDARD)):
        account.service = service
        accounts.join(account, priority)
    accounts.join(new, STANDARD)
    accounts.join(late, Priority.REALTIME)
    assert (running.service, new.service, late.service) == (0, 50, 20)
