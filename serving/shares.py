"""Fair shares: deficit round robin over tenants, in tokens.

The scheme is that of Shreedhar and Varghese (Efficient Fair Queuing using Deficit Round Robin,
SIGCOMM 1995). Tenants with prompts to compute take turns; in a round each may take `quantum`
tokens. Prompts are cut at any token, so a turn ends exactly when its tokens are spent. What a
tenant decodes while others wait is charged too, after the fact: its deficit goes below zero and
it sits out the rounds that pay for it. Without anybody else waiting nothing is charged, and credit
is not saved up: a tenant that has nothing to compute loses what is left of its turn.

Between two turns of a tenant that owes nothing, every other one takes at most `quantum` tokens
plus what it decodes.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping


class Turns:
    """The turns of one step: a draft, which `Shares.commit` makes the state."""

    __slots__ = ("_quantum", "_ring", "balance", "left")

    def __init__(self, ring: Iterable[str], balance: Mapping[str, int], quantum: int) -> None:
        self._ring = deque(ring)
        self._quantum = quantum
        self.balance = {tenant: balance.get(tenant, 0) for tenant in self._ring}
        self.left: list[str] = []  # tenants that can compute nothing more in this step

    def current(self) -> str | None:
        """Whose turn it is; None when nobody can compute anything more."""
        ring, balance = self._ring, self.balance
        if not ring:
            return None
        for _ in range(len(ring)):
            if balance[ring[0]] > 0:
                return ring[0]
            ring.rotate(-1)
        # As many rounds pass as it takes until somebody may compute again.
        best = max(balance[tenant] for tenant in ring)
        credit = self._quantum * (1 + -best // self._quantum)
        for tenant in ring:
            balance[tenant] += credit
        while balance[ring[0]] <= 0:
            ring.rotate(-1)
        return ring[0]

    def allowance(self, budget_tokens: int) -> int:
        """How many tokens the current tenant may take now; all there are if it is alone."""
        if len(self.balance) == 1:
            return budget_tokens
        return min(budget_tokens, self.balance[self._ring[0]])

    def spend(self, num_tokens: int) -> None:
        """The current tenant takes `num_tokens`; free of charge if it is alone."""
        if len(self.balance) > 1:
            self.balance[self._ring[0]] -= num_tokens
            if self.balance[self._ring[0]] <= 0:
                self._ring.rotate(-1)  # its turn is over

    def leave(self) -> None:
        """The current tenant can compute nothing more in this step."""
        self.left.append(self._ring.popleft())

    def order(self) -> list[str]:
        """The tenants, the one whose turn it is first."""
        return [*self._ring, *self.left]


class Shares:
    """What tenants of one priority may compute, and whose turn it is."""

    __slots__ = ("_balance", "_order", "_quantum")

    def __init__(self, quantum: int) -> None:
        """Start with nobody.

        Args:
            quantum: tokens that each tenant may take in a round.
        """
        assert quantum >= 1
        self._quantum = quantum
        self._order: list[str] = []
        self._balance: dict[str, int] = {}

    @property
    def empty(self) -> bool:
        """Whether nobody has credit or debt."""
        return not self._balance

    def turns(self, tenants: Iterable[str]) -> Turns:
        """Return the turns of `tenants`, who have prompts to compute; changes nothing."""
        active = dict.fromkeys(tenants)
        known = [tenant for tenant in self._order if tenant in active]
        ring = dict.fromkeys([*known, *active])
        return Turns(ring, self._balance, self._quantum)

    def commit(self, turns: Turns) -> None:
        """The step with these turns ran. Debts of tenants who had nothing to compute stay."""
        debts = {tenant: owed for tenant, owed in self._balance.items() if owed < 0}
        self._balance = debts | turns.balance
        self._order = turns.order()

    def charge(self, tenant: str, num_tokens: int) -> None:
        """`tenant` decoded `num_tokens` while others had prompts to compute."""
        self._balance[tenant] = self._balance.get(tenant, 0) - num_tokens

    def forget(self, tenant: str) -> None:
        """`tenant` has no unfinished request any more; its debt is void."""
        self._balance.pop(tenant, None)
