"""Being asked to stop with several processes: JAX's preemption service stood in for by its rule."""

import signal

import jax
import pytest

from diffjax.parallel import distributed
from diffjax.training import stop
from diffjax.training.stop import StopRequest


class Service:
    """Answers True for one number alone, as the real one does: the largest any process had reached, plus one."""

    def __init__(self, at):
        self.at, self.asked = at, []

    def reached_preemption_sync_point(self, number):
        self.asked.append(number)
        return number == self.at


@pytest.fixture
def several(monkeypatch):
    def use(at):
        service = Service(at)
        monkeypatch.setattr(stop, "multihost_utils", service)
        monkeypatch.setattr(distributed, "process_count", lambda: 2)
        return service

    return use


def test_the_answer_is_kept_and_every_poll_counts(several):
    service = several(at=3)
    with StopRequest() as request:
        assert [request.poll() for _ in range(5)] == [False, False, True, True, True]
    assert service.asked == [1, 2, 3] and request.reason == "SIGTERM"


def test_sigterm_is_left_to_the_service_and_ctrl_c_is_handed_to_it(several, monkeypatch, capfd):
    several(at=None)
    sent = []
    before = signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGINT)
    with StopRequest() as request:
        assert signal.getsignal(signal.SIGTERM) is before[0]
        monkeypatch.setattr("os.kill", lambda pid, number: sent.append(number))
        monkeypatch.setattr("os._exit", lambda code: sent.append(code))
        request._on_signal(signal.SIGINT, None)
        assert sent == [signal.SIGTERM] and not request.poll()
        request._on_signal(signal.SIGINT, None)
        assert sent[1] == 130
    assert (signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGINT)) == before
    assert "Ctrl-C: saving after this step; Ctrl-C again leaves at once" in capfd.readouterr().err


def test_without_the_service_nothing_stops(several):
    service = several(at=1)
    jax.config.update("jax_enable_preemption_service", False)
    try:
        with StopRequest() as request:
            assert not request.poll() and service.asked == []
    finally:
        jax.config.update("jax_enable_preemption_service", True)
