import json

import pytest

from accmt.state import Stateful, TrainingState


def train(state, *, epochs, batches, accumulation, samples=2):
    """Count as the loop does: windows of `accumulation` batches, the last of an epoch shorter."""
    state.grad_accum_steps = accumulation
    for _ in range(epochs):
        waiting = 0
        for batch in range(batches):
            is_boundary = state.is_grad_accum_boundary(is_last_batch=batch == batches - 1)
            state.count_batch()
            waiting += samples
            if is_boundary:
                state.count_samples(waiting)
                state.count_step()
                waiting = 0
        state.count_epoch()


def test_counters_after_two_epochs():
    state = TrainingState()
    train(state, epochs=2, batches=5, accumulation=2)
    assert state.state_dict() == {
        "epoch": 2,
        "train_step": 0,
        "epoch_step": 0,
        "batch_iteration": 10,
        "global_step": 6,
        "skipped_steps": 0,
        "samples_seen": 20,
        "target_tokens_seen": 0,
        "bad_samples": 0,
        "skipped_batches": 0,
        "val_step": 0,
        "eval_global_step": 0,
        "evaluations_done": 0,
        "last_evaluation_step": None,
    }


def test_the_index_of_the_work_is_the_number_of_what_is_finished():
    state = TrainingState()
    assert (state.epoch, state.batch_idx, state.optimizer_step) == (0, 0, 0)
    state.count_batch()
    state.count_batch()
    state.count_samples(7)
    state.count_step()
    assert (state.train_step, state.batch_idx, state.batch_iteration) == (2, 2, 2)
    assert (state.global_step, state.optimizer_step, state.epoch_step) == (1, 1, 1)
    assert state.samples_seen == 7
    state.count_epoch()
    assert (state.epoch, state.train_step, state.epoch_step, state.global_step) == (1, 0, 0, 1)


@pytest.mark.parametrize(
    ("accumulation", "boundaries"),
    [(1, [0, 1, 2, 3, 4, 5, 6]), (2, [1, 3, 5, 6]), (3, [2, 5, 6]), (4, [3, 6]), (7, [6]), (100, [6])],
)
def test_a_window_ends_after_its_batches_and_with_the_epoch(accumulation, boundaries):
    state = TrainingState(grad_accum_steps=accumulation)
    found = []
    for batch in range(7):
        if state.is_grad_accum_boundary(is_last_batch=batch == 6):
            found.append(batch)
        state.count_batch()
    assert found == boundaries


def test_counters_survive_a_checkpoint():
    state = TrainingState()
    train(state, epochs=1, batches=3, accumulation=2)
    state.count_batch()
    state.count_evaluation()
    assert isinstance(state, Stateful)
    saved = json.loads(json.dumps(state.state_dict()))
    again = TrainingState()
    again.load_state_dict(saved)
    assert again.state_dict() == state.state_dict()
    assert again == state.__class__(**saved, grad_accum_steps=1) != state


def test_the_views_show_what_the_trainer_is_doing():
    state = TrainingState(num_processes=4, grad_accum_steps=2)
    assert (state.fn, state.stage, state.status) == (None, None, "initializing")
    assert not any((state.is_last_training_batch, state.is_last_epoch, state.finished, state.interrupted))
    now = state.now
    now.fn, now.stage, now.status = "fit", "validate", "running"
    now.is_last_training_batch = now.is_last_epoch = now.interrupted = True
    assert (state.fn, state.stage, state.status) == ("fit", "validate", "running")
    assert state.is_last_training_batch
    assert state.is_last_epoch
    assert state.interrupted
    assert not state.finished
    now.status = "finished"
    assert state.finished
    assert (state.num_processes, state.grad_accum_steps) == (4, 2)


@pytest.mark.parametrize(
    "view",
    [
        "fn",
        "stage",
        "status",
        "is_last_training_batch",
        "is_last_epoch",
        "finished",
        "interrupted",
        "sample_indices",
        "batch_idx",
        "optimizer_step",
        "best_train_loss",
        "best_valid_loss",
    ],
)
def test_views_are_read_only(view):
    with pytest.raises(AttributeError, match=view):
        setattr(TrainingState(), view, None)


def test_best_losses_are_those_that_models_are_saved_by_and_zero_is_a_value():
    state = TrainingState()
    assert state.best_train_loss is None
    assert state.best_valid_loss is None
    state.best = {"best_train_loss": 0.0, "best_valid_loss": 0.25}
    assert (state.best_train_loss, state.best_valid_loss) == (0.0, 0.25)
