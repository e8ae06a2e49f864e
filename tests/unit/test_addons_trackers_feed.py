import math
import time

import pytest

from accmt.addons.trackers.delivery import Feed
from accmt.addons.trackers.delivery_state import Account, Replay, Rewinding
from accmt.addons.trackers.spec import UserTracker
from accmt.tracking.history import History
from tests.faults.tracking import Faulty


@pytest.fixture
def history(tmp_path):
    history = History(tmp_path)
    for step in range(5):
        history.add_values({"loss": float(step)}, step)
    yield history
    history.close()


def deliver(history, settles_in_s):
    account, tracker = Account(), Faulty()
    tracker.settles_in_s = settles_in_s
    replay = Replay(history.path, account, Rewinding.KEEPS)
    feed = Feed(UserTracker(tracker), tracker, history, account, replay)
    while feed.fetch():
        list(feed.hand_over(2))
    feed.close()
    assert tracker.steps == list(range(5))
    assert account.delivered == 5
    return feed, account


def test_what_a_tracker_writes_at_once_has_settled_at_once(history):
    feed, account = deliver(history, 0.0)
    assert feed.settle() is None
    assert account.settled == 5


def test_what_a_tracker_keeps_in_memory_settles_when_its_time_is_over(history):
    feed, account = deliver(history, 0.2)
    left = feed.settle()
    assert left == pytest.approx(0.2)
    assert account.settled == 0
    time.sleep(left)
    assert feed.settle() is None
    assert account.settled == 5


def test_what_a_tracker_writes_at_its_end_does_not_settle_before(history):
    feed, account = deliver(history, math.inf)
    assert feed.settle() is None
    assert account.settled == 0
