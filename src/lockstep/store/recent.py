"""What a client of a store has used last, kept in memory up to a number of values."""

from __future__ import annotations

import threading
from collections import OrderedDict
from typing import TypeVar

T = TypeVar("T")


class Recent(OrderedDict[str, T]):
    """The values used last, up to a number of them; safe for threads."""

    def __init__(self, most: int) -> None:
        super().__init__()
        self._most = most
        self._lock = threading.Lock()

    def recall(self, key: str) -> T | None:
        with self._lock:
            if key not in self:
                return None
            self.move_to_end(key)
            return self[key]

    def keep(self, key: str, value: T) -> None:
        with self._lock:
            self[key] = value
            self.move_to_end(key)
            while len(self) > self._most:
                self.popitem(last=False)

    def forget(self, key: str) -> None:
        with self._lock:
            self.pop(key, None)
