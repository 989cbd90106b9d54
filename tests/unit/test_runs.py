"""Runs: sorted, durable, bounded by bytes for rows of any width."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pyarrow as pa
import pytest

from lockstep.errors import Corrupt, Invalid
from lockstep.fingerprint import fingerprint
from lockstep.job import KEYS, RUN, Json, SortKey
from lockstep.ordering import order
from lockstep.sink.run import RunSink, SortedRunSink
from lockstep.sink.staging import parse_staged_name
from lockstep.storage import Storage
from tests.runs_lab import ARROW, JOB, SCHEMA, RunsLab, batch_of, rows_of, small

ROOT = Path(__file__).parents[2]


def sink_of(lab: RunsLab, index: int = 0, epoch: int = 1) -> RunSink:
    return RunSink(lab.plan, JOB, "map", index, epoch, lab.storage)


def blocks_in(path: str) -> list[pa.RecordBatch]:
    reader = pa.ipc.open_file(path)
    return [reader.get_batch(at) for at in range(reader.num_record_batches)]


def test_a_run_holds_the_rows_in_order_in_blocks_with_all_that_planning_needs(tmp_path: Path) -> None:
    rows = [((at * 37) % 100, "t" * (at % 50), at) for at in range(500)]
    with small(block=1000):
        lab = RunsLab(tmp_path, memory=10**6)
        sink = sink_of(lab, index=3, epoch=2)
        sink.add(batch_of(rows[:300]))
        sink.add(batch_of(rows[300:]))
        (run,) = sink.flush()
    blocks = blocks_in(run.path)
    assert [row for block in blocks for row in rows_of(block)] == sorted(rows, key=lambda row: row[0])
    assert all(block.nbytes < 2500 for block in blocks)
    assert parse_staged_name(run.path) == (JOB, "map", 3, 2, 0)
    assert run.kind == RUN
    assert run.size_bytes == Path(run.path).stat().st_size
    assert (run.rows, run.stats["blocks"]) == (500, len(blocks))
    assert run.stats["raw_bytes"] == pytest.approx(sum(block.nbytes for block in blocks), rel=0.01)
    assert run.fingerprint == fingerprint(batch_of(rows))
    assert len(run.stats["samples"]) == -(-len(blocks) // run.stats["sampled"])
    json.dumps(run.to_json())


def test_a_buffer_that_is_full_says_so_and_writes_a_run_when_more_comes(tmp_path: Path) -> None:
    lab = RunsLab(tmp_path, memory=14_000)
    sink = sink_of(lab)
    batch = batch_of([(at, "x" * 20, at) for at in range(60)])
    full = []
    for _ in range(2):
        sink.add(batch)
        full.append(sink.full)
    assert full == [False, True]
    assert list(tmp_path.rglob("*.arrow")) == []
    sink.add(batch)
    assert len(list(tmp_path.rglob("*.arrow"))) == 1, "the full buffer was kept in memory"
    assert [run.rows for run in sink.flush()] == [120, 60]
    assert sink.flush() == []
    assert sink.pending_bytes == 0


def test_the_companions_of_rows_count_in_the_memory_of_their_buffer(tmp_path: Path) -> None:
    batch = batch_of([(at, f"{at:01000}", at) for at in range(10)])
    full = []
    for unique in ((), ("s",)):
        sink = sink_of(RunsLab(tmp_path, unique=unique, memory=22_500))
        sink.add(batch, pa.array(range(10)))
        full.append(sink.full)
    assert full == [False, True]


def test_a_run_that_the_storage_does_not_have_with_its_size_is_not_listed(tmp_path: Path) -> None:
    class Short(Storage):
        def size(self, url: str) -> int | None:
            found = super().size(url)
            return None if found is None else found - 1

    lab = RunsLab(tmp_path)
    sink = RunSink(lab.plan, JOB, "map", 0, 1, Short())
    sink.add(batch_of([(1, "x", 1)]))
    with pytest.raises(Corrupt):
        sink.flush()


def test_an_aborted_sink_leaves_no_file_that_was_not_finished(tmp_path: Path) -> None:
    lab = RunsLab(tmp_path)
    sink = sink_of(lab)
    sink.add(batch_of([(1, "x", 1)]))
    sink.abort()
    assert list(tmp_path.rglob("*.arrow")) == []
    combined = SortedRunSink(lab.plan, JOB, "combine", 0, 1, lab.storage)
    with small(block=100):
        combined.add(batch_of([(at, "x" * 50, at) for at in range(50)]))
        assert combined.pending_bytes > 0
        combined.abort()
    assert list(tmp_path.rglob("*.arrow")) == []


def test_no_attempt_overwrites_a_file_of_another(tmp_path: Path) -> None:
    lab = RunsLab(tmp_path)
    paths = set()
    for index, epoch in [(0, 1), (0, 2), (1, 1)]:
        sink = sink_of(lab, index, epoch)
        for _ in range(2):
            sink.add(batch_of([(1, "x", 1)]))
            paths |= {run.path for run in sink.flush()}
    assert len(paths) == 6


def test_dictionaries_that_differ_from_batch_to_batch_are_written_as_values(tmp_path: Path) -> None:
    lab = RunsLab(tmp_path, (SortKey("s"),), memory=10**6)
    sink = sink_of(lab)
    for texts in (["b", "a"], ["c", None]):
        columns = [pa.array([1, 2]), pa.array(texts).dictionary_encode(), pa.array([3, 4])]
        sink.add(pa.record_batch(columns, names=ARROW.names))
    (run,) = sink.flush()
    assert [row[1] for block in blocks_in(run.path) for row in rows_of(block)] == [None, "a", "b", "c"]


def test_rows_without_numbers_are_refused_where_a_unique_key_needs_them(tmp_path: Path) -> None:
    lab = RunsLab(tmp_path, unique=("k",))
    with pytest.raises(Corrupt, match="record numbers"):
        sink_of(lab).add(batch_of([(1, "x", 1)]))


def test_a_null_in_a_required_column_is_refused(tmp_path: Path) -> None:
    schema: Json = {**SCHEMA, "fields": [{**SCHEMA["fields"][0], "required": True}, *SCHEMA["fields"][1:]]}
    lab = RunsLab(tmp_path, schema=schema)
    with pytest.raises(Corrupt, match='"k" is required'):
        sink_of(lab).add(batch_of([(None, "x", 1)]))


def test_a_column_with_a_name_of_ours_is_refused_with_a_way_out(tmp_path: Path) -> None:
    schema: Json = {
        **SCHEMA,
        "fields": [*SCHEMA["fields"], {**SCHEMA["fields"][0], "name": "_lockstep_task"}],
    }
    with pytest.raises(Invalid, match="_lockstep_task") as refused:
        sink_of(RunsLab(tmp_path, schema=schema))
    assert "rename the column" in (refused.value.hint or "")


def test_keep_last_sorts_the_companion_backwards_within_equal_keys(tmp_path: Path) -> None:
    lab = RunsLab(tmp_path, unique=("s",), on_duplicate="keep-last", memory=10**6)
    lab.map([[batch_of([(1, "b", 1), (1, "a", 2), (1, "b", 3), (1, "a", 4)])]])
    (keys,) = [file for file in lab.files["map"] if file.kind == KEYS]
    found = [(row[0], row[2]) for block in blocks_in(keys.path) for row in rows_of(block)]
    assert found == [("a", 3), ("a", 1), ("b", 2), ("b", 0)]


def test_a_long_run_is_cut_into_files_that_follow_each_other(tmp_path: Path) -> None:
    with small(block=500, long_run=3000):
        lab = RunsLab(tmp_path)
        sink = SortedRunSink(lab.plan, JOB, "combine", 0, 1, lab.storage)
        rows = [(at, "x" * 20, at) for at in range(1000)]
        for at in range(0, 1000, 50):
            sink.add(batch_of(rows[at : at + 50]))
        files = sink.flush()
    assert len(files) > 5
    assert [row for file in files for block in blocks_in(file.path) for row in rows_of(block)] == rows
    total = files[0].fingerprint
    for file in files[1:]:
        total += file.fingerprint
    assert total == fingerprint(batch_of(rows))


def measured(tmp_path: Path, body: str) -> Json:
    """Run a program in a process of its own; it prints JSON. `peak_mb` is what its memory grew by at most."""
    program = textwrap.dedent(
        f"""
        import json, resource, sys
        from pathlib import Path
        import numpy as np, pyarrow as pa
        from lockstep.job import SortKey
        from lockstep.merge import MergeReader
        from lockstep.passes import newest_runs, next_stage
        from lockstep.sink.run import RunSink, SortedRunSink
        from tests.runs_lab import JOB, RunsLab
        folder = Path({str(tmp_path)!r})

        def resident_mb(name="VmRSS"):
            lines = Path("/proc/self/status").read_text().splitlines()
            return next(int(line.split()[1]) for line in lines if line.startswith(name)) / 1000

        def texts(rows, width):
            # Without a Python object for each: an array of one letter, cut into equal texts.
            data = pa.py_buffer(np.full(rows * width, 120, np.uint8))
            offsets = pa.py_buffer(np.arange(rows + 1, dtype=np.int32) * width)
            return pa.Array.from_buffers(pa.string(), rows, [None, offsets, data])

        Path("/proc/self/clear_refs").write_text("5")
        before = resident_mb()
        """
    )
    program += textwrap.dedent(body)
    program += '\nprint(json.dumps({**answer, "peak_mb": resident_mb("VmHWM") - before}))\n'
    environment = {**os.environ, "PYTHONPATH": f"{ROOT / 'src'}{os.pathsep}{ROOT}"}
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, env=environment, timeout=280
    )
    assert done.returncode == 0, done.stderr[-3000:]
    found: Json = json.loads(done.stdout.splitlines()[-1])
    return found


@pytest.mark.long
@pytest.mark.parametrize(
    ("rows", "width"), [(400, 1_000_000), (9, 50_000_000), (4_000_000, 60), (9_000_000, 1)]
)
def test_a_buffer_of_rows_of_any_width_is_sorted_within_the_memory_of_a_task(
    tmp_path: Path, rows: int, width: int
) -> None:
    found = measured(
        tmp_path,
        f"""
        rows, width, memory = {rows}, {width}, 256_000_000
        lab = RunsLab(folder, (SortKey("k"),), memory=memory)
        sink = RunSink(lab.plan, JOB, "map", 0, 1, lab.storage)
        step = max(1, 16_000_000 // (width + 20))
        files, written = [], 0
        for first in range(0, rows, step):
            count = min(step, rows - first)
            numbers = pa.array(np.arange(first, first + count) * 2654435761 % 1000003)
            sink.add(pa.record_batch([numbers, texts(count, width), numbers], names=["k", "s", "v"]))
            if sink.full:
                files += sink.flush()
                for file in files:
                    written += file.rows
                    Path(file.path).unlink(missing_ok=True)
                files = []
        files += sink.flush()
        written += sum(file.rows for file in files)
        answer = {{"rows": written}}
        """,
    )
    assert found["rows"] == rows
    # Beside the task's memory: what the program itself holds, which is the last batch and the next one.
    assert found["peak_mb"] < 256 + 100 + 2 * width / 1e6


@pytest.mark.long
def test_fifteen_hundred_runs_are_merged_with_256_megabytes_of_task_memory(tmp_path: Path) -> None:
    found = measured(
        tmp_path,
        """
        runs, rows, width = 1500, 2000, 80
        lab = RunsLab(folder, (SortKey("k"),), memory=256_000_000, file_size=64_000_000)
        files = []
        for number in range(runs):
            sink = RunSink(lab.plan, JOB, "map", number, 1, lab.storage)
            keys = pa.array((np.arange(rows) + number * rows) * 2654435761 % 1000000007)
            sink.add(pa.record_batch([keys, texts(rows, width), keys], names=["k", "s", "v"]))
            files += sink.flush()
        lab.files["map"] = files
        stages, stage, counted, last, ordered = [], "map", 0, -1, True
        reader = MergeReader(lab.plan, lab.storage)
        while stage != "merge":
            following = next_stage(stage, newest_runs(lab.files), lab.plan)
            stage = following.stage
            stages.append([stage, len(following.tasks)])
            lab.files[stage] = []
            for index, task in enumerate(following.tasks):
                if stage == "merge":
                    for chunk in reader.read(task.descriptor, None, 16_000_000):
                        keys = chunk.batch.column("k").to_numpy()
                        ordered = ordered and bool(keys[0] >= last and (np.diff(keys) >= 0).all())
                        last, counted = int(keys[-1]), counted + len(keys)
                    continue
                sink = SortedRunSink(lab.plan, JOB, stage, index, 1, lab.storage)
                for chunk in reader.read_whole(task.descriptor, None, 16_000_000):
                    sink.add(chunk.batch)
                lab.files[stage] += sink.flush()
        answer = {"rows": counted, "ordered": ordered, "stages": stages}
        """,
    )
    assert found["stages"][0] == ["combine", 24]
    assert found["stages"][1][0] == "merge"
    assert found["rows"] == 3_000_000
    assert found["ordered"]
    # Beside the task's memory: pages of the mapped runs, which the system takes back when it needs them.
    assert found["peak_mb"] < 256 + 100


def test_the_order_of_a_run_is_that_of_the_keys_module() -> None:
    batch = batch_of([(2, "b", 0), (None, "a", 1), (1, None, 2)])
    assert order(batch, [SortKey("k", nulls_first=False)]).tolist() == [2, 0, 1]
