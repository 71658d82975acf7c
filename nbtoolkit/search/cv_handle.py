"""CVHandle: a cross-validation that goes on, ours or another kernel's."""

from __future__ import annotations

from typing import Any

from nbtoolkit.runtime.crossing import add_note
from nbtoolkit.runtime.events import EventReader
from nbtoolkit.runtime.failure import raise_failure
from nbtoolkit.runtime.paths import RunPaths
from nbtoolkit.search.cv_result import CVResult
from nbtoolkit.search.fold_program import fold_key
from nbtoolkit.search.handle import SearchHandle


class CVHandle(SearchHandle):
    """A cross-validation that goes on, from ``wait=False`` or ``nb.attach(folder)``.

    Args:
        paths: its folder.
        options: as :class:`~nbtoolkit.runtime.result.RunHandle`'s.
    """

    def __init__(self, paths: RunPaths, **options: Any) -> None:
        super().__init__(paths, CVResult, **options)

    def result(self, timeout: float | None = None) -> CVResult:  # type: ignore[override] # one of many runs
        """Wait for the end and return the result; see :meth:`RunHandle.result`.

        Args:
            timeout: seconds to wait; None: as long as it takes.

        Raises:
            TimeoutError: it has not ended yet (it goes on).
            KeyboardInterrupt: the wait was interrupted, and the cross-validation ended.
            Exception: what the training function raised in a fold, with its own type.
        """
        __tracebackhide__ = True
        found: Any = super().result(timeout)
        result: CVResult = found
        return result

    def _outcome(self) -> Any:
        __tracebackhide__ = True
        if self._lost is None and self.paths.error.exists():
            raise_failed_fold(self.paths)
        return super()._outcome()


def raise_failed_fold(paths: RunPaths) -> None:
    """Raise what the fold that failed had raised; nothing where none left an exception."""
    __tracebackhide__ = True
    index = _failed(paths)
    fold = RunPaths(paths.folder / fold_key(index or 0))
    if index is None or not fold.error_pickle.exists():
        return
    try:
        raise_failure(fold)
    except BaseException as error:
        add_note(error, f"[nbtoolkit] fold {index}; the folds that are done are kept")
        raise


def _failed(paths: RunPaths) -> int | None:
    """The first fold that failed in this session."""
    failed: list[int] = []
    for event in EventReader(paths.events).read():
        if event["type"] == "run":
            failed.clear()
        elif event["type"] == "fold" and event["state"] == "failed":
            failed.append(event["fold"])
    return failed[0] if failed else None
