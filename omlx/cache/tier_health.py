"""Whether the cold tier can be written, and when to look again. Counts seconds, has no clock."""

from __future__ import annotations

from enum import StrEnum

FIRST_RETRY_S = 1
LONGEST_RETRY_S = 30
LOOK_S = 5
"""A tier that works is looked at this often, so that a full disk shows before a write fails."""

QUIET_S = 60
"""A disk that comes and goes is not reported more often than this."""


class TierState(StrEnum):
    OK = "ok"
    OFF = "off"
    FULL = "full"
    DEGRADED = "degraded"


class TierHealth:
    """``tick`` is called each second. After a failure it is looked at after 1, 2, 4, .. 30 s."""

    def __init__(self, *, on: bool) -> None:
        self.state = TierState.OK if on else TierState.OFF
        self._wait_s = LOOK_S
        self._pause_s = FIRST_RETRY_S
        self._quiet_s = 0

    def failed(self, *, full: bool) -> bool:
        """Returns whether that is news worth a line in the log."""
        assert self.state is not TierState.OFF, "who wrote to a tier that is off?"
        state = TierState.FULL if full else TierState.DEGRADED
        news = state is not self.state
        if news and self.state is TierState.OK:
            self._pause_s = FIRST_RETRY_S
            self._wait_s = FIRST_RETRY_S
        self.state = state
        return news and self._say()

    def look_again(self) -> None:
        """It was looked at and does not work yet."""
        self._pause_s = min(LONGEST_RETRY_S, 2 * self._pause_s)
        self._wait_s = self._pause_s

    def works(self) -> bool:
        """Returns whether that is news."""
        news = self.state in (TierState.FULL, TierState.DEGRADED)
        if news:
            self.state = TierState.OK
        return news

    def tick(self) -> bool:
        """A second went by. True: look whether it can be written now."""
        self._quiet_s = max(0, self._quiet_s - 1)
        if self.state is TierState.OFF:
            return False
        self._wait_s -= 1
        if self._wait_s > 0:
            return False
        self._wait_s = LOOK_S if self.state is TierState.OK else self._pause_s
        return True

    def _say(self) -> bool:
        if self._quiet_s:
            return False
        self._quiet_s = QUIET_S
        return True
