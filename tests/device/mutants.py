"""Mutants of the engine: each removes or misplaces one wait, event, guard or bound. A test must notice each of them.

    python tests/device/mutants.py            run every mutant
    python tests/device/mutants.py WORD ...   those whose file, text or description has a word

The program applies each mutant to a copy of the package, and runs the test that is named beside it. If that test passes,
it runs all tests of the device. It prints the test that failed, or that the mutant survived. `test_mutants.py` checks
in each run of the tests that the list is true to the code.

A change of the engine that removes a text from this list moves or drops the mutant. A new wait gets a new mutant.
"""

from __future__ import annotations

import os
import re
import shutil
import signal
import sys
import tempfile
from pathlib import Path
from typing import NamedTuple

import pytest
import torch  # noqa: F401  (for the forks)

ROOT = Path(__file__).parents[2]
ENGINE = "tests/device/test_engine.py"
TRANSFER, PREFETCH = "tests/test_transfer.py", "tests/test_prefetch.py"
DEVICE_TESTS = ["tests/device", "tests/test_cuda.py", "tests/test_fill.py", TRANSFER, PREFETCH]


class Mutant(NamedTuple):
    file: str
    text: str
    """Occurs once in the file."""
    replacement: str
    breaks: str
    test: str
    """``FILE::NAME`` of a test that fails. Tests in ``tests/device`` run on the strict device. Empty: no test can fail."""
    equivalent: str = ""
    """Why no test can fail."""


STAGING, MOVES, DEVICE = "_memory/staging.py", "_memory/transfer.py", "_memory/device.py"
CAST, AHEAD, FILL = "_memory/cast.py", "_batch/prefetch.py", "_dict/fill.py"

MUTANTS = [
    # Pinned memory: when it is used again, by whom, and how much there is.
    Mutant(STAGING, "slot.event = slot.stream.record_event()", "pass", "a slot is used again before its copy", f"{ENGINE}::test_nobody_waits_for_a_busy_stream_and_a_pageable_source_is_free"),
    Mutant(STAGING, "(slot.event is None or slot.event.query())", "True", "a slot is used again before its copy", f"{ENGINE}::test_nobody_waits_for_a_busy_stream_and_a_pageable_source_is_free"),
    Mutant(STAGING, "slot.stream == stream and slot.used", "slot.used", "two streams share a slot", f"{ENGINE}::test_two_streams_never_share_a_slot"),
    Mutant(STAGING, "slot.used + nbytes <= SLOT", "slot.used <= SLOT", "a copy ends behind its slot", f"{ENGINE}::test_it_is_bounded_with_threads_on_one_stream"),
    Mutant(STAGING, "start + aligned(nbytes)", "start", "two copies share the bytes of a slot", f"{ENGINE}::test_nobody_waits_for_a_busy_stream_and_a_pageable_source_is_free"),
    Mutant(STAGING, "if len(self.slots) == SLOTS:", "if False:", "pinned memory has no bound", f"{ENGINE}::test_a_host_that_runs_ahead_waits_for_its_own_oldest_copies"),
    Mutant(STAGING, "if slot.stream == stream and not slot.users]", "if not slot.users]", "a stream waits for the copies of another", f"{ENGINE}::test_a_stream_does_not_wait_for_the_memory_of_another"),
    Mutant(STAGING, "if slot.stream == stream and not slot.users]", "if slot.stream == stream]", "the host waits for a slot that is in use", "", "the wait is for the last event of that slot, and the loop then asks again"),
    Mutant(STAGING, "if not slot.users and (", "if (", "a slot is taken from a thread that fills it", f"{ENGINE}::test_a_slot_that_is_in_use_is_left_alone"),
    Mutant(STAGING, "slot.users -= 1", "slot.users = 0", "the first of two threads gives their slot back", f"{ENGINE}::test_a_slot_that_is_in_use_is_left_alone"),
    Mutant(STAGING, "events[0].synchronize()", "pass", "the host asks again and again instead of waiting", f"{ENGINE}::test_a_host_that_runs_ahead_waits_for_its_own_oldest_copies"),
    Mutant(STAGING, "events[0].synchronize()", "events[-1].synchronize()", "the host waits for its last copy", f"{ENGINE}::test_a_host_waits_for_its_oldest_copy_alone"),
    Mutant(STAGING, "stream = torch.accelerator.current_stream(self.device)", "stream = torch.accelerator.current_stream()", "events are recorded on a stream of another device", f"{ENGINE}::test_the_memory_of_a_copy_to_another_device_is_not_used_again_before"),
    Mutant(STAGING, "with self.lock:\n                slot", "if True:\n                slot", "two threads take one part of a slot", f"{ENGINE}::test_one_thread_at_a_time_changes_the_slots"),
    Mutant(STAGING, "with self.lock:\n            slot.users", "if True:\n            slot.users", "a thread gives a slot back while another looks for one", f"{ENGINE}::test_one_thread_at_a_time_changes_the_slots"),
    Mutant(STAGING, "with on_device(self.device):", "if True:", "memory is pinned for the current device", f"{TRANSFER}::test_memory_is_pinned_under_the_target_device"),
    Mutant(STAGING, "staging.release(taken[0])", "pass", "a slot is never given back", f"{ENGINE}::test_an_idle_device_needs_few_slots"),
    Mutant(STAGING, "    finally:\n        staging.release", "    except ZeroDivisionError:\n        pass\n    else:\n        staging.release", "a slot is lost after an error", f"{ENGINE}::test_after_an_error_it_is_used_again"),
    Mutant(STAGING, "            except RuntimeError:\n                return None", "            except ZeroDivisionError:\n                return None", "a move fails where no memory can be pinned", f"{ENGINE}::test_where_none_can_be_pinned"),
    # To a device.
    Mutant(MOVES, "torch.accelerator.current_stream(target).synchronize()", "pass", "a source is changed before its copy", f"{ENGINE}::test_a_larger_move_waits_and_its_source_is_free"),
    Mutant(MOVES, "current_stream(target).synchronize()", "current_stream().synchronize()", "the host waits for another device", f"{ENGINE}::test_tensors_that_cannot_be_packed_wait_once"),
    Mutant(MOVES, "        finally:\n            if wait:", "        except ZeroDivisionError:\n            pass\n        else:\n            if wait:", "a source is changed before its copy, after an error", f"{TRANSFER}::test_the_host_waits_though_a_copy_fails"),
    Mutant(MOVES, "non_blocking or wait, copy)", "True, copy)", "a copy that nobody waits for", f"{ENGINE}::test_results_are_complete"),
    Mutant(MOVES, "> STAGED_MOVE:", "> 1 << 40:", "a large move waits for its own pinned memory", f"{ENGINE}::test_a_larger_move_waits_and_its_source_is_free"),
    Mutant(MOVES, ".is_pinned() else staged", "is None else staged", "a pinned source is copied on the host", f"{ENGINE}::test_a_large_pinned_source_that_nobody_waits_for_is_read_from_where_it_is"),
    Mutant(MOVES, "copy_(part), non_blocking=pinned)", "copy_(part))", "a move waits for the stream", f"{ENGINE}::test_nobody_waits_for_a_busy_stream_and_a_pageable_source_is_free"),
    Mutant(MOVES, "copy_(part), non_blocking=pinned)", "copy_(part), non_blocking=True)", "a copy of a buffer that is not pinned, and is freed at once", "", "such a copy reads its source before it returns"),
    Mutant(MOVES, "].to(target, non_blocking=pinned)", "].to(target)", "a move waits for the stream", f"{ENGINE}::test_nobody_waits_for_a_busy_stream_and_a_pageable_source_is_free"),
    Mutant(MOVES, "not torch.accelerator.current_stream(target).query()", "False", "a move waits for the stream", f"{ENGINE}::test_nobody_waits_for_a_busy_stream_and_a_pageable_source_is_free"),
    Mutant(MOVES, "not torch.accelerator.current_stream(target).query()", "True", "large tensors are copied on the host though the device is idle", f"{TRANSFER}::test_an_idle_device_reads_each_large_tensor_and_storage_from_where_it_is"),
    Mutant(MOVES, "current_stream(target).query()", "current_stream().query()", "another device is asked whether it is busy", f"{ENGINE}::test_the_memory_of_a_copy_to_another_device_is_not_used_again_before"),
    Mutant(MOVES, "count = SLOT // dtype.itemsize", "count = 2 * SLOT // dtype.itemsize", "a part is larger than a slot", f"{ENGINE}::test_nobody_waits_for_a_busy_stream_and_a_pageable_source_is_free"),
    Mutant(MOVES, "(capturing and source != target)", "False", "a replay does not read its sources again", f"{ENGINE}::test_each_replay_reads_pinned_sources_again"),
    Mutant(MOVES, "(there.accelerator and is_capturing(target))", "False", "a replay does not read its sources again", f"{ENGINE}::test_each_replay_reads_pinned_sources_again"),
    Mutant(MOVES, "(here.accelerator and is_capturing(source))", "False", "a capture sees the end of a copy to the host", f"{TRANSFER}::test_while_a_graph_is_captured_nothing_is_gathered"),
    Mutant(MOVES, "nbytes > STAGED_PINNED)", "True)", "a small pinned source waits for the stream", f"{ENGINE}::test_a_pinned_source_is_free_too"),
    Mutant(MOVES, "nbytes > STAGED_PINNED)", "False)", "a large pinned source is copied on the host", f"{ENGINE}::test_a_pinned_source_is_free_too"),
    Mutant(MOVES, "staged = cast if max(", "staged = {} if max(", "a pinned source is cast without pinned memory", f"{ENGINE}::test_casts"),
    # To the host.
    Mutant(MOVES, "[] if target == CPU and non_blocking else ", "", "the caller, who waits, waits twice", f"{TRANSFER}::test_where_bytes_are_not_trusted_nothing_is_gathered"),
    Mutant(MOVES, "late = non_blocking and CPU in", "late = False and CPU in", "data is cast on the host before it is there", f"{TRANSFER}::test_on_the_way_to_the_host_without_a_wait_it_is_cast_on_the_device"),
    Mutant(MOVES, "out[i] = out[i].clone()", "pass", "a result on the host keeps others alive", f"{ENGINE}::test_small_tensors_share_a_wait"),
    # What a device can do, and whose memory is in use.
    Mutant(DEVICE, "return stream.is_capturing()", "return False", "a replay does not read its sources again", f"{ENGINE}::test_each_replay_reads_pinned_sources_again"),
    Mutant(DEVICE, "stream = torch.accelerator.current_stream(device)\n    if _stream", "stream = torch.accelerator.current_stream()\n    if _stream", "the stream of another device is asked", f"{TRANSFER}::test_while_a_graph_is_captured_nothing_is_gathered"),
    Mutant(DEVICE, "        if is_capturing(device):", "        if False:", "the trial of a device ends a capture", f"{ENGINE}::test_a_device_is_not_tried_out"),
    Mutant(DEVICE, "return _device_index(device.index)", "return _device_index(0)", "memory is pinned for another device", f"{TRANSFER}::test_memory_is_pinned_under_the_target_device"),
    Mutant(DEVICE, "        tensor.record_stream(stream)", "        pass", "memory is used again while a stream reads it", f"{ENGINE}::test_memory_that_another_stream_reads_is_kept"),
    Mutant(DEVICE, "if start in seen:", "if seen:", "only the first storage is recorded", f"{ENGINE}::test_memory_that_another_stream_reads_is_kept"),
    Mutant(DEVICE, "if start in seen:", "if False:", "a storage is recorded for each of its tensors", "tests/test_capabilities.py::test_record_stream_once_for_each_storage"),
    # Batches ahead.
    Mutant(AHEAD, "last.synchronize()  # the loader may", "pass  #", "a loader changes a batch that is being copied", f"{ENGINE}::test_a_loader_may_use_its_memory_again"),
    Mutant(AHEAD, "        finally:\n            if last is not None:\n                last.synchronize()", "        finally:", "a copy is under way after a break", f"{ENGINE}::test_a_break_leaves_no_copy_under_way"),
    Mutant(AHEAD, "side.wait_stream(torch.accelerator.current_stream(device))", "pass", "a slot is filled while it is read", f"{ENGINE}::test_a_slot_is_filled_after_the_work_on_it"),
    Mutant(AHEAD, "if slots or any(", "if any(", "a slot is filled while it is read", f"{ENGINE}::test_a_slot_is_filled_after_the_work_on_it"),
    Mutant(AHEAD, "tensor.device.type == device.type for", "False for", "a batch is read before it is written", f"{PREFETCH}::test_what_is_on_the_device_already_may_still_be_computed_there"),
    Mutant(AHEAD, "                    with side:", "                    if True:", "the copies are on the stream of the consumer", f"{ENGINE}::test_a_loader_may_use_its_memory_again"),
    Mutant(AHEAD, "last = watch.copy_ends(side, begin)", "last = last or watch.copy_ends(side, begin)", "the host waits for the first copy only", f"{ENGINE}::test_a_loader_may_use_its_memory_again"),
    Mutant(AHEAD, "torch.accelerator.current_stream(device).wait_event(last)", "pass", "one slot is read before its copy", f"{ENGINE}::test_a_slot_is_filled_after_the_work_on_it"),
    Mutant(AHEAD, "record_stream(parts, torch.accelerator.current_stream(device))", "pass", "a batch is overwritten while it is read", f"{ENGINE}::test_a_batch_is_not_overwritten_while_the_consumer_reads_it"),
    Mutant(AHEAD, "record_stream(parts, torch.accelerator.current_stream(device))", "record_stream(parts, torch.accelerator.current_stream())", "a batch is overwritten while another device's stream reads it", f"{ENGINE}::test_a_batch_is_not_overwritten_while_the_consumer_reads_it"),
    Mutant(AHEAD, "else to_device(source, device, non_blocking=True)", "else to_device(source, device)", "a pinned batch is copied on the host", f"{ENGINE}::test_pinned_batches_are_copied_from_where_they_are"),
    Mutant(AHEAD, "len(ready) <= depth", "len(ready) <= depth + 1", "a batch too many is on the device", f"{PREFETCH}::test_so_many_and_no_more_are_fetched_ahead"),
    Mutant(AHEAD, "if max_bytes is not None and ready and", "if False and ready and", "the bytes ahead have no bound", f"{PREFETCH}::test_no_more_bytes_are_copied_ahead_than_allowed"),
    Mutant(AHEAD, "slots - 1 if slots", "slots if slots", "a slot is filled before the consumer has done with it", f"{ENGINE}::test_a_slot_is_filled_after_the_work_on_it"),
    Mutant(AHEAD, "non_blocking=True, copy=True))", "non_blocking=True))", "a batch of the loader becomes a slot", f"{ENGINE}::test_batches_of_the_device_do_not_become_slots"),
    Mutant(AHEAD, "fill_(batch, non_blocking=True)", "fill_(batch)", "a pinned batch is copied on the host", f"{ENGINE}::test_pinned_batches_are_copied_from_where_they_are"),
    # Static inputs, casts, pinning.
    Mutant(FILL, "late = non_blocking and device != CPU", "late = non_blocking", "a result on the host is not complete", f"{ENGINE}::test_on_the_device_and_back"),
    Mutant(FILL, "non_blocking=late, source=source", "non_blocking=True, source=source", "a pinned source is changed before its copy", f"{ENGINE}::test_a_source_is_free"),
    Mutant(FILL, "device == source and share_memory(targets, values)", "False", "a field is read after it is written", "tests/test_fill.py::test_memory_that_both_share"),
    Mutant(CAST, "if casts else None, non_blocking, copy)", "if casts else None, True, copy)", "a copy or a cast that nobody waits for", f"{ENGINE}::test_a_single_tensor_is_complete"),
    Mutant(CAST, "non_blocking = False  # torch may", "pass  #", "a copy to mps reads memory that was freed", f"{TRANSFER}::test_to_mps_every_copy_is_blocking"),
    Mutant(CAST, "if is_dense(tensor) and is_expanded(tensor) and not tensor.is_pinned():", "if False:", "an expanded tensor cannot be pinned", f"{ENGINE}::test_expanded_fields_can_be_pinned"),
]  # fmt: skip


def mutated(mutant: Mutant) -> str:
    return source_of(mutant).replace(mutant.text, mutant.replacement)


def source_of(mutant: Mutant) -> str:
    return (ROOT / "tensordict_lite" / mutant.file).read_text()


def failing_test(package: Path, test: str) -> str | None:
    """Run a test, or all tests of the device, with the package in a folder. Returns the first that fails, or None."""
    file, _, name = test.partition("::")
    files = [file] if file else DEVICE_TESTS
    arguments = ["-x", "-q", "--tb=no", "-p", "no:cacheprovider", "-c", str(ROOT / "pyproject.toml")]
    arguments += ["-k", name] if name else ["-m", "not slow"]
    arguments += ["-p", "strict"] if files[0].startswith("tests/device") else []
    output = package / "output"
    # In a fork of this process, which has imported torch: to import it takes longer than most tests.
    child = os.fork()
    if child == 0:
        signal.alarm(400)  # ends a test that hangs
        sys.stdout = sys.stderr = output.open("w")
        os.chdir(package)
        sys.path[:0] = [str(package), str(ROOT / "tests" / "device")]
        code = pytest.main([*arguments, *(str(ROOT / each) for each in files)])
        sys.stdout.flush()
        os._exit(code)
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    if code == 0:
        return None
    found = re.search(r"^(?:FAILED|ERROR) \S*?(tests/\S+)", output.read_text(), re.MULTILINE)
    return found[1] if found else f"exit code {code}: {output.read_text()[-300:]}"


def main() -> None:
    words = sys.argv[1:]
    chosen = [mutant for mutant in MUTANTS if not words or any(word in " ".join(mutant) for word in words)]
    survived = 0
    for mutant in chosen:
        what = f"{mutant.file}: {mutant.breaks} ({mutant.text.strip().splitlines()[0]!r})"
        if mutant.equivalent:
            print(f"equivalent  {what}: {mutant.equivalent}", flush=True)
            continue
        with tempfile.TemporaryDirectory() as folder:
            shutil.copytree(ROOT / "tensordict_lite", Path(folder) / "tensordict_lite")
            (Path(folder) / "tensordict_lite" / mutant.file).write_text(mutated(mutant))
            killer = failing_test(Path(folder), mutant.test)
            if killer is None:
                killer = failing_test(Path(folder), "")
                killer = killer and f"not by {mutant.test}, but by {killer}"
        survived += killer is None
        print(f"{'SURVIVED' if killer is None else 'killed'}    {what}" + (f": {killer}" if killer else ""), flush=True)
    print(f"{len(chosen)} mutants, {survived} survived")
    sys.exit(survived > 0)


if __name__ == "__main__":
    main()
