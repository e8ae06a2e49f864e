import pytest
import torch

from accmt.engine.accelerator import explaining_device, touch
from accmt.errors import DeviceError
from tests.raising import raises_at
from tests.toys import Linear, make_points, make_trainer

BUSY = "CUDA error: CUDA-capable device(s) is/are busy or unavailable\nFor debugging consider CUDA_LAUNCH_BLOCKING=1"
FULL = "CUDA out of memory. Tried to allocate 2.00 MiB. GPU 0 has a total capacity of 79.11 GiB of which 1 MiB is free."
OLD_DRIVER = "The NVIDIA driver on your system is too old (found version 11040). Please update your GPU driver"
OLD = "CUDA error: no kernel image is available for execution on the device"


@pytest.mark.parametrize(
    ("error", "do"),
    [
        (torch.AcceleratorError(BUSY), "find the process that uses it"),
        (torch.OutOfMemoryError(FULL), "find the process that uses it"),
        (RuntimeError(OLD), "driver and torch must support that GPU"),
        (RuntimeError(OLD_DRIVER), "driver and torch must support that GPU"),
    ],
    ids=["busy", "full", "old", "old driver"],
)
def test_a_device_that_cannot_be_used_is_an_error_before_anything_is_built(monkeypatch, error, do):
    def fail(device):
        raise error

    monkeypatch.setattr("accmt.engine.accelerator.touch", fail)
    module = Linear()
    with raises_at(DeviceError, "the device of the run", do=do) as caught:
        make_trainer().fit(module, make_points())
    assert "CUDA_LAUNCH_BLOCKING" not in str(caught.value)
    assert caught.value.__cause__ is error


def test_other_errors_stay_as_they_are():
    error = RuntimeError("a group of another backend")

    def fail():
        raise error

    with pytest.raises(RuntimeError) as caught, explaining_device():
        fail()
    assert caught.value is error


def test_the_accelerator_itself_may_find_the_device_busy(monkeypatch):
    def fail(**_):
        raise torch.AcceleratorError(BUSY)

    monkeypatch.setattr("accelerate.Accelerator.__init__", lambda self, **_: fail())
    with raises_at(DeviceError, "the device of the run", "busy"):
        make_trainer().fit(Linear(), make_points())


def test_a_device_is_used_and_its_result_is_waited_for(monkeypatch):
    used = []

    class Ones:
        def add_(self, _):
            return self

        def item(self):
            used.append("read")

    monkeypatch.setattr(torch, "ones", lambda _, device: used.append(device) or Ones())
    touch(torch.device("cuda", 1))
    assert used == [torch.device("cuda", 1), "read"]
