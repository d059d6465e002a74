"""Processes that do jobs end with whoever feeds them."""

from __future__ import annotations

from libai_data.data.shard_work.process_pool import ProcessPool, Work
from tests.deadline import wait_until
from tests.forks import a_fork_that_lives_on


def test_processes_end_with_their_parent_although_a_fork_of_it_lives_on() -> None:
    pool = ProcessPool(Work(len, str))
    assert pool.do("job") == 3
    with a_fork_that_lives_on():
        # All that the parent's end would close of it.
        pool._parent_pipe.close_parents_end()
        wait_until(lambda: pool._all[0].poll() is not None, "end of the first process")
    pool.close()
