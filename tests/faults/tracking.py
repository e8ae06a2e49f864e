"""A tracker that fails the way real ones do, and what the tests of delivery and of resumed runs do with trackers."""

import os
import time

from accelerate.tracking import GeneralTracker
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from accmt.addons.trackers.delivery_state import DeliveryFile
from accmt.addons.trackers.spec import resolve_trackers
from accmt.tracking import Tracking, read_history


class Faulty(GeneralTracker):
    """Writes down the steps it takes; `fault(number_of_the_call, values)` may raise or sleep."""

    name = "faulty"
    requires_logging_directory = False
    tracker = None

    def __init__(self, fault=lambda call, values: None, name="faulty"):
        super().__init__()
        self.name = name
        self.fault = fault
        self.num_calls = 0
        self.steps = []
        self.is_finished = False

    def log(self, values, step=None, **kwargs):
        self.num_calls += 1
        self.fault(self.num_calls, values)
        self.steps.append(step)

    def finish(self):
        self.is_finished = True


def make(log_with, logging_dir, *, run_name="run", offline="auto"):
    return Tracking(
        resolve_trackers(log_with),
        track_name="track",
        run_name=run_name,
        logging_dir=logging_dir,
        tracker_kwargs={},
        is_main_process=True,
        verbose=False,
        offline=offline,
    )


def log_steps(tracking, first, last, pause_s=0.0, value=float):
    for step in range(first, last + 1):
        tracking.log({"loss": value(step)}, step)
        time.sleep(pause_s)


def kill(tracking):
    """Leave a run as SIGKILL does, up to what this process needs to go on: nothing is flushed, told or closed."""
    for delivery in getattr(tracking._deliveries, "_running", ()):
        delivery._delivery_file.save = lambda: None
        if delivery.spec.name == "mlflow":  # TensorBoard's writer has nothing left, but a thread
            delivery.spec.finish = lambda tracker, status: None
        delivery.end("", 0.0)
        delivery.join(20)
        delivery.detach("KILLED")
    os.close(tracking._history._descriptor)
    tracking._unlock()  # as the system does


def warnings_of(caplog):
    return [record.getMessage() for record in caplog.records if (record.name, record.levelname) == ("accmt", "WARNING")]


def wait_until(condition, timeout_s=120):
    ends = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < ends, "waited in vain"
        time.sleep(0.01)


def steps_of(folder):
    return [row["step"] for row in read_history(folder) if "values" in row]


def points_of(client, run_id, name="loss"):
    return [(point.step, point.value) for point in client.get_metric_history(run_id, name)]


def tensorboard_points(folder):
    return [(event.step, event.value) for event in EventAccumulator(str(folder)).Reload().Scalars("loss")]


def accounts_of(folder):
    delivery_file = DeliveryFile.read(folder)  # a run without trackers has none
    return delivery_file.accounts.values() if delivery_file else ()
