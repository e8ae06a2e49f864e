from accelerate.state import PartialState
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from accmt.addons.trackers import tensorboard
from accmt.addons.trackers.spec import RunStart
from accmt.addons.trackers.tensorboard import TensorBoard, TensorBoardRun
from accmt.tracking.history import RunPlace


def test_tensorboard_keeps_the_configuration_in_the_runs_own_event_file(tmp_path):
    PartialState(cpu=True)
    run = TensorBoardRun(run_name="run", logging_dir=tmp_path)
    run.start()
    run.store_init_configuration({"lr": 0.5, "optim.type": "AdamW", "amsgrad": False, "epochs": 3})
    run.log({"train_loss": 2.0}, step=1)
    run.finish()
    assert len(list((tmp_path / "run").iterdir())) == 1
    events = EventAccumulator(str(tmp_path / "run")).Reload()
    assert [(event.step, event.value) for event in events.Scalars("train_loss")] == [(1, 2.0)]
    assert set(events.PluginTagToContent("hparams")) == {"_hparams_/session_start_info"}
    PartialState._reset_state()


def test_a_further_event_file_is_read_after_those_that_are_there(tmp_path, monkeypatch):
    seconds, place = iter([100.2, 100.9, 101.0]), RunPlace(str(tmp_path), "track", "run")
    folder = place.run_folder
    folder.mkdir(parents=True)
    (folder / "events.out.tfevents.0000000100.host.7.9").touch()
    monkeypatch.setattr(tensorboard.time, "time", lambda: next(seconds))
    monkeypatch.setattr(tensorboard.time, "sleep", lambda _: None)
    TensorBoard().build(RunStart(place, {}))
    assert next(seconds, None) is None, "it waited for the second after that of the file"
