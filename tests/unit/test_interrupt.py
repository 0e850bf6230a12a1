"""A signal that falls into a destructor is raised again at the next stage or report."""

from __future__ import annotations

import os
import signal
import warnings

import pytest

from flows.interrupt import interruptible


class Stopped(BaseException):
    """As Prefect's TerminationSignal: no Exception."""


class Destroyed:
    def __init__(self, number: int) -> None:
        self.number = number

    def __del__(self) -> None:
        os.kill(os.getpid(), self.number)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_that_a_destructor_swallows_is_raised_at_the_next_look(number: int) -> None:
    def stop(*_: object) -> None:
        raise Stopped

    before = signal.signal(number, stop)
    try:
        with interruptible() as interruption:
            interruption.check()
            with warnings.catch_warnings():
                del_me = Destroyed(number)
                del del_me
            with pytest.raises(Stopped):
                interruption.check()
        assert signal.getsignal(number) is stop
    finally:
        signal.signal(number, before)
