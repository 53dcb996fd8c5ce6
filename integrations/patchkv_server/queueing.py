"""Who is next."""

from __future__ import annotations

from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Iterator
from typing import Generic, TypeVar

Item = TypeVar("Item")
Place = TypeVar("Place")


class FairQueue(Generic[Item]):
    """Waiting items of several tenants: round robin among tenants, first come first for each.

    A tenant of which fewer items are running goes before others. An item that cannot run yet is
    passed over. Where too many wait, the tenant of which most wait has to take one back. Not safe
    for several threads, but how many wait and run can be read from any.

    Args:
        most: items that may wait.

    Attributes:
        running: items that were taken and are not done.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self._waiting: OrderedDict[str, deque[Item]] = OrderedDict()  # longest not served first
        self._count = 0  # of those
        self._running: Counter[str] = Counter()
        self.running = 0

    def __len__(self) -> int:
        return self._count

    def lengths(self, tenant: str) -> tuple[int, int]:
        """How many items of a tenant wait, and how many are running."""
        return len(self._waiting.get(tenant, ())), self._running[tenant]

    def __iter__(self) -> Iterator[Item]:
        for items in self._waiting.values():
            yield from items

    def put(self, tenant: str, item: Item, *, beyond: int = 0) -> Item | None:
        """Let an item wait.

        Args:
            tenant: whose it is.
            item: to wait.
            beyond: items that may wait above the limit.

        Returns:
            The item that may not wait, if there are too many: this one, or the last of a tenant of
            which more wait.
        """
        refused = None
        if len(self) >= self._most + beyond:
            greedy = max(self._waiting, key=lambda name: len(self._waiting[name]), default=tenant)
            if len(self._waiting.get(greedy, ())) <= len(self._waiting.get(tenant, ())) + 1:
                return item
            refused = self._waiting[greedy][-1]
            self.remove(greedy, refused)
        self._waiting.setdefault(tenant, deque()).append(item)
        self._count += 1
        return refused

    def take(self, place_for: Callable[[Item], Place | None]) -> tuple[Item, Place] | None:
        """The next item that can run, with its place; None if there is none.

        Args:
            place_for: gives an item a place to run, or None while there is no such place.
        """
        for tenant in sorted(self._waiting, key=lambda name: self._running[name]):
            for item in self._waiting[tenant]:
                place = place_for(item)
                if place is not None:
                    self.remove(tenant, item)
                    if tenant in self._waiting:
                        self._waiting.move_to_end(tenant)
                    self._running[tenant] += 1
                    self.running += 1
                    return item, place
        return None

    def done(self, tenant: str) -> None:
        """An item that was taken is done."""
        self.running -= 1
        self._running[tenant] -= 1
        if not self._running[tenant]:
            del self._running[tenant]

    def remove(self, tenant: str, item: Item) -> bool:
        """Let an item wait no longer; returns False if it does not."""
        items = self._waiting.get(tenant)
        if items is None or item not in items:
            return False
        items.remove(item)
        self._count -= 1
        if not items:
            del self._waiting[tenant]
        return True
