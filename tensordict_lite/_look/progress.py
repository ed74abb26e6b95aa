"""``progress=``: how far a long call is."""

from __future__ import annotations

from collections.abc import Callable

from .._errors import optional_module

Progress = Callable[[int, int], object] | bool | None
"""A function that is called with what is done and the total, True for a bar of tqdm, or None."""


def reporter(progress: Progress, total: int, unit: str = "B") -> Callable[[int], None]:
    """A function to call with what is done so far. Raises ``TypeError``, and ``ImportError`` without tqdm."""
    if progress is None or progress is False:
        return lambda done: None
    if callable(progress):
        return lambda done: (progress(done, total), None)[1]
    if progress is not True:
        raise TypeError(f"progress= is a function of (done, total), or True for tqdm, got {progress!r:.60}")
    needed = "progress=True needs tqdm: pip install tqdm, or give a function of (done, total)"
    bar = optional_module("tqdm.auto", needed).tqdm(total=total, unit=unit, unit_scale=True, leave=False)

    def report(done: int) -> None:
        bar.update(done - bar.n)
        if done >= total:
            bar.close()

    return report
