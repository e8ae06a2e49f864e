"""What is due when, as tables over whole runs played with counters alone."""

from __future__ import annotations

import pytest

from accmt.cadence import Cadence
from accmt.state import TrainingState


class Played:
    """A run played in the loop's order of questions; `logged` and `evaluated` hold the steps."""

    def __init__(self, cadence, steps_per_epoch, *, is_sized=True):
        self.cadence, self.updates = cadence, steps_per_epoch
        self.known_updates = steps_per_epoch if is_sized else None
        self.state, self.logged, self.evaluated = TrainingState(), [], []
        while not cadence.is_finished(self.state):
            self.play_epoch()
        self.evaluate_if(cadence.is_evaluation_due_at_end(self.state))

    def play_epoch(self):
        state = self.state
        while state.epoch_step < self.updates and not self.cadence.is_out_of_steps(state):
            state.count_step()
            if self.cadence.is_log_due(state):
                self.logged.append(state.global_step)
            self.evaluate_if(self.cadence.is_evaluation_due(state, lambda _: self.known_updates))
        self.evaluate_if(self.cadence.is_evaluation_due_at_epoch_end(state))
        if state.epoch_step == self.updates:
            state.count_epoch()

    def evaluate_if(self, is_due):
        if is_due:
            self.evaluated.append(self.state.global_step)
            self.state.count_evaluation()


@pytest.mark.parametrize(("every", "expected"), [(1, [1, 2, 3, 4, 5, 6]), (3, [3, 6]), (4, [4]), (7, []), (-1, [])])
def test_rows_of_the_log_are_counted_over_epochs(every, expected):
    assert Played(Cadence(epochs=2, max_steps=None, log_every=every), 3).logged == expected


EVALUATIONS = [
    # epochs, updates of each, every n steps, expected
    (1, 10, 4, [4, 8, 10]),
    (1, 10, 5, [5, 10]),
    (1, 10, 1, list(range(1, 11))),
    (1, 3, 7, [3]),
    (4, 3, 7, [7, 12]),
    (3, 5, 4, [4, 8, 12, 15]),
    (2, 8, 0.25, [2, 4, 6, 8, 10, 12, 14, 16]),
    (2, 8, 1.0, [8, 16]),
    (1, 8, 0.01, [1, 2, 3, 4, 5, 6, 7, 8]),
    (2, 10, 0.3, [3, 6, 9, 13, 16, 19, 20]),
    (1, 100, 0.29, [29, 58, 87, 100]),  # 0.29 * 100 is 28.999999999999996
    (1, 100, 0.57, [57, 100]),
    (1, 10, 0.39, [3, 6, 9, 10]),
    (2, 3, 0.5, [1, 2, 3, 4, 5, 6]),
    (2, 1, 0.5, [1, 2]),
    (3, 4, None, [4, 8, 12]),
]


@pytest.mark.parametrize(("epochs", "updates", "every", "expected"), EVALUATIONS)
def test_evaluations_come_as_told_and_never_twice_on_the_same_weights(epochs, updates, every, expected):
    assert Played(Cadence(epochs=epochs, max_steps=None, evaluate_every=every), updates).evaluated == expected


@pytest.mark.parametrize(("every", "expected"), [(4, [4, 8]), (5, [5, 10]), (None, [10])])
def test_the_last_update_is_left_unevaluated_where_told_so(every, expected):
    cadence = Cadence(epochs=1, max_steps=None, evaluate_every=every, evaluate_at_end=False)
    assert Played(cadence, 10).evaluated == expected


@pytest.mark.parametrize(
    ("epochs", "every", "expected"), [(4, 2, [6, 12]), (4, 1, [3, 6, 9, 12]), (3, 2, [6]), (1, 5, [])]
)
def test_epochs_between_evaluations_are_counted(epochs, every, expected):
    assert Played(Cadence(epochs=epochs, max_steps=None, evaluate_every_n_epochs=every), 3).evaluated == expected


@pytest.mark.parametrize(("every", "expected"), [(4, [4, 8, 10]), (None, [7, 10])])
def test_data_without_a_length_are_evaluated_by_count(every, expected):
    cadence = Cadence(epochs=None, max_steps=10, evaluate_every=every)
    assert Played(cadence, 7, is_sized=False).evaluated == expected


@pytest.mark.parametrize(
    ("epochs", "max_steps", "done", "updates", "expected"),
    [
        (3, None, 1, 5, False),
        (3, None, 2, 5, True),
        (3, None, 2, None, True),
        (None, 12, 1, 5, False),
        (None, 12, 2, 5, True),
        (None, 10, 1, 5, True),
        (9, 10, 1, 5, True),
        (9, 10, 1, None, False),
    ],
)
def test_the_last_epoch_is_known_beforehand(epochs, max_steps, done, updates, expected):
    state = TrainingState(epoch=done, global_step=done * 5)
    assert Cadence(epochs=epochs, max_steps=max_steps).is_last_epoch(state, updates) is expected


def test_the_last_epoch_is_still_the_last_one_halfway_through():
    cadence = Cadence(epochs=None, max_steps=8)
    state = TrainingState(epoch=1, global_step=7, epoch_step=2)
    assert cadence.is_last_epoch(state, 5)
    for done in range(5):  # the epoch before it is not, however much of it is done
        assert not cadence.is_last_epoch(TrainingState(epoch=0, global_step=done, epoch_step=done), 5)


@pytest.mark.parametrize("every", [1, 4, 0.25])
def test_nothing_is_due_before_the_first_update_even_if_windows_were_skipped(every):
    cadence = Cadence(epochs=1, max_steps=None, evaluate_every=every)
    state = TrainingState()
    state.count_batch()
    state.count_step(is_skipped=True)
    assert not cadence.is_log_due(state)
    assert not cadence.is_evaluation_due(state, lambda _: 8)
    assert not cadence.is_evaluation_due_at_end(state)


def test_a_skipped_first_window_of_an_epoch_is_not_evaluated_by_fraction():
    cadence = Cadence(epochs=2, max_steps=None, evaluate_every=0.5)
    state = TrainingState(epoch=1, global_step=7, last_evaluation_step=4)
    state.count_step(is_skipped=True)
    assert not cadence.is_evaluation_due(state, lambda _: 8)


@pytest.mark.parametrize("every", [2, 0.5, None])
def test_a_skipped_update_after_an_evaluation_is_not_evaluated_again(every):
    cadence = Cadence(epochs=1, max_steps=None, evaluate_every=every)
    state = TrainingState(global_step=2, epoch_step=2, last_evaluation_step=2)
    state.count_step(is_skipped=True)
    assert not cadence.is_evaluation_due(state, lambda _: 4)
    assert not cadence.is_evaluation_due_at_epoch_end(state)
    assert not cadence.is_evaluation_due_at_end(state)
