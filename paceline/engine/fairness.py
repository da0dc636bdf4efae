"""Who has been served how much: the virtual token counters of Sheng et al., "Fairness in Serving LLMs" (OSDI 2024).

A tenant is in the line of a class while it has somebody who waits in that class. Of those in a line the one with the smallest
counter is next. A tenant of weight w is charged a w-th of what it is served.
"""

import heapq
from collections.abc import Iterable
from dataclasses import dataclass
from math import inf

from paceline.core.request import Priority

# A token that is generated costs more than one of a prompt, which shares a pass over the weights with many; as in the paper.
PROMPT_TOKEN = 1.0
OUTPUT_TOKEN = 2.0


@dataclass(slots=True, eq=False)
class Account:
    """One tenant's counter. `num_sequences` are all that it has here, `is_listed` whether it is among those that may be idle."""

    tenant: str
    service: float = 0.0
    num_sequences: int = 0
    weight: int = 1
    is_listed: bool = False

    def charge(self, service: float) -> None:
        """The tenant was served so much."""
        self.service += service / self.weight


class Accounts:
    """The tenants that have anything here, and those that were served more than somebody who waits, and owe the lead."""

    def __init__(self) -> None:
        self._accounts: dict[str, Account] = {}
        # Who is in the line of each class, with how many.
        self._lines: dict[Priority, dict[Account, int]] = {priority: {} for priority in Priority}
        # Nobody who waits has a smaller counter, nor will have; where nobody waits, that of the last one to come in.
        self._level = 0.0
        # A heap of those that may be idle.
        self._idle: list[tuple[float, str]] = []

    def enter(self, tenant: str, weight: int = 1) -> Account:
        """One more sequence of a tenant."""
        account = self._accounts.setdefault(tenant, Account(tenant))
        account.weight = weight
        account.num_sequences += 1
        return account

    def leave(self, account: Account) -> None:
        """One fewer. A tenant without any is forgotten once nobody who waits has been served less."""
        account.num_sequences -= 1
        if not account.num_sequences:
            self._list(account)
            self._forget()

    def join(self, account: Account, priority: Priority) -> None:
        """One more waits. Who had nobody in the line starts level with the least served in it: having waited for nothing earns nothing.

        Where nobody is in it, those in the other lines are the measure.
        """
        line = self._lines[priority]
        if account not in line:
            all_waiting = (each.service for other in self._lines.values() for each in other)
            self._level = max(self._level, min(all_waiting, default=0.0))
            account.service = max(account.service, min((each.service for each in line), default=self._level))
        line[account] = line.get(account, 0) + 1

    def quit(self, account: Account, priority: Priority) -> None:
        """One fewer waits."""
        line = self._lines[priority]
        line[account] -= 1
        if line[account]:
            return
        del line[account]
        if not any(self._lines.values()):
            self._level = max(self._level, account.service)
        self._forget()

    def charge(self, accounts: Iterable[Account], num_charged: int, token: float) -> None:
        """A token that counts so much to each of `num_charged` accounts, some of which may be the same."""
        if len(self._accounts) == 1:
            (only,) = self._accounts.values()
            only.charge(token * num_charged)
            return
        for account in accounts:
            account.charge(token)

    def services(self) -> dict[str, float]:
        """The counters, for whoever looks."""
        return {tenant: account.service for tenant, account in self._accounts.items()}

    def _list(self, account: Account) -> None:
        if not account.is_listed:
            account.is_listed = True
            heapq.heappush(self._idle, (account.service, account.tenant))

    def _forget(self) -> None:
        """Whoever is idle and would be lifted anyway; everybody who is idle when nobody waits, to whom anything could be owed."""
        limit = self._level if any(self._lines.values()) else inf
        while self._idle and self._idle[0][0] <= limit:
            account = self._accounts[heapq.heappop(self._idle)[1]]
            account.is_listed = False
            if account.num_sequences:
                continue
            if account.service <= limit:
                del self._accounts[account.tenant]
            else:
                self._list(account)
