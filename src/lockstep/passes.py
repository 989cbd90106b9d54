"""Which tasks an import takes after its rows lie in sorted runs: combine, unique, merge.

A run is a chain of one or more files. More runs than a merge can have open are combined first, neighbours
into one longer run each, at most twice; then unique keys are checked; then ranges of the key, about one data
file each, are merged into the table. A range lies between two bounds (key, run): a key that is much heavier
than a range is cut by runs. All of it follows from the manifests alone: no run is opened.
"""

from __future__ import annotations

import base64
import bisect
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from lockstep.errors import Corrupt, Invalid
from lockstep.job import KEYS, LOSERS, RUN, Json, Plan, StagedFile, TaskSpec
from lockstep.keys import MOST_KEY_BYTES, Bound, Key, key_from_json
from lockstep.merge import bound_to_json, window_bytes
from lockstep.sink.staging import parse_staged_name
from lockstep.unique import Published

FAN_IN: Final = 64
"""Runs that one task merges: each has a file open and a block in memory."""
ALWAYS_HELD_BYTES: Final = 64_000_000
"""What a merge may hold of all runs, however little memory a task has."""
TASKS_FOR_PARALLELISM: Final = 8
LEAST_RANGE_BYTES: Final = 32_000_000
FILE_RATIO: Final = 2
"""Bytes of rows for each byte of a data file, as a rule."""

COMBINE: Final = ("combine", "recombine")

Samples = Mapping[str, Sequence[Key]]
"""The samples of each file, in order."""


# Runs as the planner knows them


@dataclass(frozen=True)
class Chain:
    """One run: files whose rows follow each other in order."""

    files: Sequence[StagedFile]

    @property
    def rows(self) -> int:
        return sum(file.rows for file in self.files)

    @property
    def raw_bytes(self) -> int:
        return sum(int(file.stats["raw_bytes"]) for file in self.files)

    @property
    def held_bytes(self) -> int:
        """What a merge has in memory of this run at least."""
        return max(
            int(file.stats["held_bytes" if "held_bytes" in file.stats else "block_bytes"])
            for file in self.files
        )


def chains_of(files: Sequence[StagedFile], kind: str, plan: Plan) -> list[Chain]:
    """The runs of a kind, in the order of their rows in the input.

    Files of one task of a combining stage are one run. For `keep-last` the companions are taken backwards:
    the first of equal keys is then the one to keep. Raises: Corrupt for a file that is not a run's.
    """
    places: dict[tuple[int, int, int], StagedFile] = {}
    combined = False
    for file in files:
        if file.kind != kind or file.rows == 0:
            continue
        name = parse_staged_name(file.path)
        if name is None:
            raise Corrupt(f"{file.path} is listed as a run, but no run has such a name")
        combined = combined or name[1] in COMBINE
        places[name[2:]] = file
    ordered = [places[place] for place in sorted(places)]
    if not combined:
        chains = [Chain([file]) for file in ordered]
        return chains[::-1] if _backwards(kind, plan) else chains
    tasks: dict[int, list[StagedFile]] = {}
    for place in sorted(places):
        tasks.setdefault(place[0], []).append(places[place])
    return [Chain(members) for _, members in sorted(tasks.items())]


def _backwards(kind: str, plan: Plan) -> bool:
    return kind == KEYS and plan.terms is not None and plan.terms.on_duplicate == "keep-last"


# Which stage comes next


@dataclass(frozen=True)
class NextStage:
    stage: str
    tasks: Sequence[TaskSpec]


def next_stage(
    done: str,
    files: Sequence[StagedFile],
    plan: Plan,
    published: Callable[[], Published | None] = lambda: None,
) -> NextStage:
    """What follows when every task of the stage `done` is done: combine, recombine, unique or merge.

    `files` are the newest runs and companions: those of the last stage that made any (`newest_runs`), and
    the losers if there are some. The same files give the same tasks. An import without rows gives a merge
    without tasks. `published` says what the table holds; it is asked only if keys are to be compared next.
    """
    if done not in ("unique", COMBINE[-1]):
        groups = [task for kind in (RUN, KEYS) for task in plan_combine(files, kind, plan)]
        if groups:
            return NextStage(COMBINE[0] if done == "map" else COMBINE[1], groups)
    if done != "unique" and plan.terms is not None and plan.terms.unique:
        return NextStage("unique", plan_unique(files, plan, published()))
    return NextStage("merge", plan_merge(files, plan))


def newest_runs(by_stage: Mapping[str, Sequence[StagedFile]]) -> list[StagedFile]:
    """Of the manifests of all stages so far: the runs that the next one reads, and the losers."""
    found: dict[str, Sequence[StagedFile]] = {}
    for stage in ("map", *COMBINE):
        for kind in (RUN, KEYS):
            if members := [file for file in by_stage.get(stage, ()) if file.kind == kind]:
                found[kind] = members
    losers = [file for file in by_stage.get("unique", ()) if file.kind == LOSERS]
    return [*found.get(RUN, ()), *found.get(KEYS, ()), *losers]


def plan_combine(files: Sequence[StagedFile], kind: str, plan: Plan) -> list[TaskSpec]:
    """Tasks that make few long runs of many, or none if one merge can have them all open."""
    chains = chains_of(files, kind, plan)
    groups = list(_groups(chains, window_bytes(plan)))
    if len(groups) <= 1:
        return []
    return [_whole(group, kind) for group in groups]


def _groups(chains: Sequence[Chain], most_bytes: int) -> Iterator[list[Chain]]:
    """Neighbours that one task can have open together: by number, and by what a block of each takes."""
    group: list[Chain] = []
    held_bytes = 0
    for chain in chains:
        if len(group) >= FAN_IN or (len(group) >= 2 and held_bytes + chain.held_bytes > most_bytes):
            yield group
            group, held_bytes = [], 0
        group.append(chain)
        held_bytes += chain.held_bytes
    if group:
        yield group


def _whole(group: Sequence[Chain], kind: str) -> TaskSpec:
    rows, size_bytes = sum(chain.rows for chain in group), sum(chain.raw_bytes for chain in group)
    return _spec(group, _samples(group), kind, None, None, (), rows, size_bytes)


def plan_merge(files: Sequence[StagedFile], plan: Plan) -> list[TaskSpec]:
    """One task for each range of the key, about one data file each, and a few for parallelism."""
    return plan_ranges(files, RUN, plan)


def plan_unique(files: Sequence[StagedFile], plan: Plan, published: Published | None) -> list[TaskSpec]:
    """One task for each range of the unique key, with the files of the table that may hold keys of it."""
    specs = plan_ranges(files, KEYS, plan)
    runs = [file for file in files if file.kind == KEYS and file.rows]
    low, high = _extent(runs)
    for spec in specs:
        inner_low, inner_high = spec.descriptor["low"], spec.descriptor["high"]
        least = key_from_json(inner_low["key"])[0] if inner_low else low
        most = key_from_json(inner_high["key"])[0] if inner_high else high
        met = [one.file for one in published.files if one.meets(least, most)] if published else []
        spec.descriptor["published"] = {
            "snapshot_id": published.snapshot_id if published else None,
            "reading": published.reading if published and met else {},
            "files": met,
            "between": [None if code is None else base64.b64encode(code).decode() for code in (least, most)],
        }
    return specs


def _extent(runs: Sequence[StagedFile]) -> tuple[bytes | None, bytes | None]:
    """Between which codes of the first column all keys lie; None where that is not known."""
    least = min((key_from_json(file.stats["samples"][0])[0] for file in runs), default=None)
    most = max((key_from_json(file.stats["last"])[0] for file in runs), default=None)
    return least, None if most is None or len(most) >= MOST_KEY_BYTES else most


def plan_ranges(files: Sequence[StagedFile], kind: str, plan: Plan) -> list[TaskSpec]:
    """Ranges of the runs of a kind, from their samples. They cover every row once, in order."""
    chains = chains_of(files, kind, plan)
    if not chains:
        return []
    _refuse_too_large(chains, plan)
    losers = [file.path for file in files if file.kind == LOSERS and file.rows] if kind == RUN else []
    total = sum(chain.raw_bytes for chain in chains)
    # The hashes of a range of unique keys are held in memory, a data file is not.
    most_bytes = FILE_RATIO * plan.file_size_bytes if kind == RUN else 2 * window_bytes(plan)
    wanted = max(
        1,
        -(-total // max(1, most_bytes)),
        min(TASKS_FOR_PARALLELISM, total // LEAST_RANGE_BYTES),
    )
    samples = _samples(chains)
    weights = _weights(chains, samples)
    bounds = _bounds(weights, wanted, split_by_run=kind == RUN)
    edges: list[Bound | None] = [None, *bounds, None]
    rows = sum(chain.rows for chain in chains)
    shares = _shares(weights, bounds)
    return [
        _spec(chains, samples, kind, low, high, losers, int(rows * share), int(total * share))
        for low, high, share in zip(edges[:-1], edges[1:], shares, strict=True)
    ]


def _refuse_too_large(chains: Sequence[Chain], plan: Plan) -> None:
    """As a rule keys of megabytes: of other rows a merge holds little, however large they are.

    Raises: Invalid if the runs, combined as far as they are, cannot be merged in the memory of a task.
    """
    memory_bytes = plan.limits.task_memory_bytes
    held_bytes = sum(chain.held_bytes for chain in chains)
    if held_bytes <= max(memory_bytes // 2, ALWAYS_HELD_BYTES) or len(chains) <= 2:
        return
    largest_bytes = max(chain.held_bytes for chain in chains)
    raise Invalid(
        f"{len(chains)} runs with keys of up to {_mb(largest_bytes)} in a row cannot be merged in "
        f"{_mb(memory_bytes)} of memory: {_mb(held_bytes)} of them would be held at a time",
        hint=f'import again with limits.task_memory = "{_mb(3 * held_bytes)}", or with a shorter key',
    )


def _mb(size_bytes: int) -> str:
    return f"{-(-size_bytes // 10**6)}MB"


def _samples(chains: Sequence[Chain]) -> Samples:
    return {
        file.path: [key_from_json(raw) for raw in file.stats["samples"]]
        for chain in chains
        for file in chain.files
    }


def _weights(chains: Sequence[Chain], samples: Samples) -> list[tuple[Bound, float]]:
    """Where the samples lie, in order, and the bytes that each stands for."""
    found: list[tuple[Bound, float]] = []
    for ordinal, chain in enumerate(chains):
        for file in chain.files:
            keys = samples[file.path]
            share = int(file.stats["raw_bytes"]) / max(1, len(keys))
            found.extend(((key, ordinal), share) for key in keys)
    return sorted(found)


def _bounds(weights: Sequence[tuple[Bound, float]], ranges: int, *, split_by_run: bool) -> list[Bound]:
    """At most `ranges - 1` bounds that cut the weights into equal parts."""
    total = sum(weight for _, weight in weights)
    bounds: list[Bound] = []
    seen = 0.0
    for bound, weight in weights:
        if seen >= total * (len(bounds) + 1) / ranges and len(bounds) + 1 < ranges:
            bounds.append(bound)
        seen += weight
    return _distinct_bounds(bounds, split_by_run)


def _distinct_bounds(bounds: Sequence[Bound], split_by_run: bool) -> list[Bound]:
    """The same bounds without needless cuts inside one key: only a key that holds two of them is heavy."""
    heavy = {a[0] for a, b in itertools.pairwise(bounds) if a[0] == b[0]}
    kept: list[Bound] = []
    for key, ordinal in bounds:
        bound = (key, ordinal if split_by_run and key in heavy else 0)
        if not kept or kept[-1] < bound:
            kept.append(bound)
    return kept


def _shares(weights: Sequence[tuple[Bound, float]], bounds: Sequence[Bound]) -> list[float]:
    """The part of all rows in each range, by the samples."""
    total = sum(weight for _, weight in weights) or 1.0
    shares = [0.0] * (len(bounds) + 1)
    at = 0
    for bound, weight in weights:
        while at < len(bounds) and bounds[at] <= bound:
            at += 1
        shares[at] += weight / total
    return shares


def _spec(
    chains: Sequence[Chain],
    samples: Samples,
    kind: str,
    low: Bound | None,
    high: Bound | None,
    losers: Sequence[str],
    rows: int,
    size_bytes: int,
) -> TaskSpec:
    descriptor: Json = {
        "kind": kind,
        "runs": [
            [piece for file in chain.files if (piece := _piece(file, samples[file.path], low, high))]
            for chain in chains
        ],
        "low": bound_to_json(low),
        "high": bound_to_json(high),
        "losers": list(losers),
    }
    return TaskSpec(descriptor, rows, size_bytes)


def _piece(file: StagedFile, samples: Sequence[Key], low: Bound | None, high: Bound | None) -> Json | None:
    """A file, and the blocks of it that can hold rows of the range; None if there are none.

    A sample is the key of the first row of its block, or lies before it where the key was cut. A block
    before a sample that is less than `low` holds nothing of the range: bounds are samples too, so that one
    which was cut is never the beginning of the other.
    """
    step, blocks = int(file.stats["sampled"]), int(file.stats["blocks"])
    before = bisect.bisect_left(samples, low[0]) if low is not None else 0
    within = bisect.bisect_right(samples, high[0]) if high is not None else len(samples)
    first, last = max(0, before - 1) * step, min(blocks, within * step)
    if first >= last:
        return None
    return {
        "path": file.path,
        "size": file.size_bytes,
        "rows": file.rows,
        "first": first,
        "last": last,
    }
