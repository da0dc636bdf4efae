"""Who has been served how much: the virtual token counters of Sheng et al., "Fairness in Serving LLMs" (OSDI 2024).

Among tenants that wait the one with the smallest counter is next. Of two that never stop waiting neither gets ahead of the
other by more than a batch's worth of tokens, however many requests the other one sends. A tenant of weight w is charged a
w-th of what it is served.
"""

from collections.abc import Iterable
from dataclasses import dataclass

# A token that is generated costs more than one of a prompt, which shares a pass over the weights with many; as in the paper.
PROMPT_TOKEN = 1.0
OUTPUT_TOKEN = 2.0


@dataclass(slots=True, eq=False)
class Account:
    """One tenant's counter. `num_sequences` are its waiting and running ones."""

    tenant: str
    service: float = 0.0
    num_sequences: int = 0
    weight: int = 1

    def charge(self, service: float) -> None:
        """The tenant was served so much."""
        self.service += service / self.weight


class Accounts:
    """The tenants that have anything here, and those that were served more than the others and owe them the lead."""

    def __init__(self) -> None:
        self._accounts: dict[str, Account] = {}

    def enter(self, tenant: str, weight: int = 1) -> Account:
        """One more sequence of a tenant. Whoever comes from idleness starts level with the least served: idling earns nothing."""
        account = self._accounts.setdefault(tenant, Account(tenant))
        account.weight = weight
        if account.num_sequences == 0:
            account.service = max(account.service, self._least_service())
        account.num_sequences += 1
        return account

    def leave(self, account: Account) -> None:
        """One fewer. A tenant without any is forgotten once the others have caught up."""
        account.num_sequences -= 1
        least = self._least_service()
        if account.num_sequences == 0:
            idle = [
                each for each in self._accounts.values() if not each.num_sequences and each.service <= least
            ]
            for each in idle:
                del self._accounts[each.tenant]

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

    def _least_service(self) -> float:
        active = (each.service for each in self._accounts.values() if each.num_sequences)
        # When nobody is here, the last one to leave has set the level.
        return min(active, default=max((each.service for each in self._accounts.values()), default=0.0))
