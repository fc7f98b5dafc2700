# SPDX-License-Identifier: Apache-2.0
"""What is known of implementations in this process: probed once, loaded once."""

from __future__ import annotations

import threading

from .log import logger
from .types import BackendLike, DeviceFacts, OpImpl, Rejected, Verdict

__all__ = ["Availability"]


class Availability:
    """Remembers the answers of probes, and which backends were loaded, or why they were not."""

    def __init__(self) -> None:
        self._lock = threading.RLock()
        # The objects are kept beside their ids, so that no id is given to another meanwhile.
        self._verdicts: dict[tuple[int, DeviceFacts], tuple[OpImpl, Verdict]] = {}
        self._loaded: dict[int, tuple[BackendLike, Rejected | None]] = {}

    def on(self, impl: OpImpl, device: DeviceFacts) -> Verdict:
        """Whether an implementation can be used on this process's device."""
        backend = impl.backend
        if backend is not None:
            _, failure = self._loaded.get(id(backend), (backend, None))
            if failure is not None:
                return failure
        key = (id(impl), device)
        known = self._verdicts.get(key)
        if known is None:
            known = self._verdicts[key] = (impl, impl.availability(device))
        return known[1]

    def load(self, impl: OpImpl) -> bool:
        """Import what the implementation needs; a failure is remembered as its reason."""
        backend = impl.backend
        if backend is None:
            return True
        with self._lock:
            known = self._loaded.get(id(backend))
            if known is None:
                failure: Rejected | None = None
                try:
                    backend.load()
                except Exception as error:
                    failure = Rejected(
                        f"loading it raised {type(error).__name__}: {error}", "load_error"
                    )
                    logger.warning("%s cannot be used: %s", impl.impl_id, failure.reason)
                known = self._loaded[id(backend)] = (backend, failure)
            return known[1] is None
