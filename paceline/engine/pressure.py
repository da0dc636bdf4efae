"""What preemptions teach: how many blocks admission leaves free, when it pauses, and how many may run at once."""

from collections import deque

from paceline.engine.scheduler_config import SchedulerConfig

# A preempting step raises the watermark by this share of the pool; a calm one lowers it by a fiftieth of that.
_RISE = 0.01
_FALL = _RISE / 50
# A pause begins with so much less concurrency; each pause's length of calm gives a tenth of that back.
_LOWER = 0.9
_REGAIN = 0.01


class Pressure:
    """Told of every step that computes."""

    def __init__(self, config: SchedulerConfig) -> None:
        self._config = config
        self._recent: deque[bool] = deque(maxlen=config.cool_down_window)
        self._num_steps_left = 0
        self._num_calm_steps = 0
        self._seats = float(config.max_num_seqs)
        self.watermark = config.watermark
        self.num_cool_downs = 0

    @property
    def is_cooling(self) -> bool:
        """Whether nobody is admitted, and routers had better send elsewhere."""
        return self._num_steps_left > 0

    @property
    def max_seats(self) -> int:
        """How many sequences may run at once now."""
        return max(1, int(self._seats))

    def end_pause(self) -> None:
        """Nobody computes: there is nothing to recover from."""
        self._num_steps_left = 0

    def note_step(self, *, preempted: bool, num_running: int) -> None:
        """A step has preempted somebody, or nobody."""
        self._num_steps_left = max(0, self._num_steps_left - 1)
        self._recent.append(preempted)
        if preempted:
            self.watermark = min(self.watermark + _RISE, self._config.watermark + self._config.watermark_rise)
            self._num_calm_steps = 0
            if sum(self._recent) >= self._config.cool_down_after:
                self._cool_down(num_running)
            return
        self.watermark = max(self.watermark - _FALL, self._config.watermark)
        self._num_calm_steps += 1
        if self._num_calm_steps % self._config.cool_down_steps == 0:
            self._seats = min(
                self._seats + max(1.0, _REGAIN * self._config.max_num_seqs), self._config.max_num_seqs
            )

    def _cool_down(self, num_running: int) -> None:
        self._recent.clear()
        self._num_steps_left = self._config.cool_down_steps
        self._seats = max(1.0, min(self._seats, num_running) * _LOWER)
        self.num_cool_downs += 1
