"""What goes wrong in one run: drawn from the seed, each kind on or off, so that runs differ in character."""

from __future__ import annotations

import random
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Window:
    """A time in which something does not answer, in seconds since the start."""

    first: float
    last: float

    def __contains__(self, at: object) -> bool:
        return isinstance(at, float) and self.first <= at < self.last


@dataclass(frozen=True)
class Faults:
    """Probabilities for one call each, and what happens now and then. All end at `quiet_s`."""

    quiet_s: float
    crash: float = 0.0
    """The process dies at this call: before it, inside a transaction, or after it."""
    stall: float = 0.0
    """The call takes up to minutes, and everybody else goes on."""
    store_refused: float = 0.0
    store_reply_lost: float = 0.0
    catalog_refused: float = 0.0
    catalog_reply_lost: float = 0.0
    catalog_late: float = 0.0
    """The sender gives up on a request that arrives later, up to `late_s` after."""
    late_s: float = 300.0
    storage_refused: float = 0.0
    storage_reply_lost: float = 0.0
    source_refused: float = 0.0
    source_corrupt: float = 0.0
    channel_cut: float = 0.0
    sleep_in_commit: float = 0.0
    """A process sleeps, for up to minutes, when its commit or its fence is ready to be sent."""
    kill_in_commit: float = 0.0
    """A user kills the job at that moment."""
    kill_before_commit: float = 0.0
    """A user kills a job that is being committed when somebody looks at a table."""
    speculation: float = 0.0
    skew_s: float = 0.0
    freezes: int = 0
    kills: int = 0
    """Processes killed from outside, at any instant, whatever they do."""
    stops: int = 0
    """Workers that are asked to end."""
    engine_deaths: int = 0
    replaced_tables: int = 0
    rivals: int = 0
    expiries: int = 0
    schema_changes: int = 0
    table_hidden: float = 0.0
    store_away: list[Window] = field(default_factory=list)
    catalog_away: list[Window] = field(default_factory=list)
    storage_away: list[Window] = field(default_factory=list)

    @property
    def any(self) -> bool:
        """False for a run in which nothing at all is disturbed."""
        return any(value for name, value in vars(self).items() if name not in ("quiet_s", "late_s"))


RATES = {
    "crash": 0.02,
    "stall": 0.03,
    "store_refused": 0.05,
    "store_reply_lost": 0.05,
    "catalog_refused": 0.2,
    "catalog_reply_lost": 0.4,
    "catalog_late": 0.4,
    "storage_refused": 0.1,
    "storage_reply_lost": 0.1,
    "source_refused": 0.05,
    "source_corrupt": 0.005,
    "channel_cut": 0.05,
    "sleep_in_commit": 0.4,
    "kill_in_commit": 0.4,
    "kill_before_commit": 0.2,
    "speculation": 0.3,
    "table_hidden": 0.05,
}
COUNTS = {
    "freezes": 3,
    "kills": 3,
    "stops": 2,
    "engine_deaths": 2,
    "replaced_tables": 1,
    "rivals": 4,
    "expiries": 3,
    "schema_changes": 1,
}


def draw_faults(source: random.Random) -> Faults:
    quiet_s = source.uniform(15.0, 110.0)
    if source.random() < 0.04:
        return Faults(quiet_s)
    share = source.choice((0.15, 0.35, 0.6))
    rates = {name: source.uniform(0.1, 1.0) * most for name, most in RATES.items() if source.random() < share}
    counts = {name: source.randint(1, most) for name, most in COUNTS.items() if source.random() < share}
    return Faults(
        quiet_s,
        late_s=source.choice((30.0, 300.0, 1500.0)),
        skew_s=source.choice((0.0, 1.0, 40.0)) if source.random() < share else 0.0,
        store_away=_windows(source, quiet_s, share),
        catalog_away=_windows(source, quiet_s, share),
        storage_away=_windows(source, quiet_s, share),
        **rates,  # type: ignore[arg-type]
        **counts,
    )


def _windows(source: random.Random, quiet_s: float, share: float) -> list[Window]:
    if source.random() > share / 2:
        return []
    first = source.uniform(0.0, quiet_s)
    return [Window(first, min(quiet_s, first + source.uniform(1.0, 150.0)))]
