"""Processes that do jobs end with whoever feeds them."""

from __future__ import annotations

from libai_data.data.shard_work.process_pool import ProcessPool, Work
from tests.forks import a_fork_that_lives_on
from tests.loader.streams import eventually


def test_processes_end_with_their_parent_although_a_fork_of_it_lives_on() -> None:
    pool = ProcessPool(Work(len, str))
    assert pool.do("job") == 3
    with a_fork_that_lives_on():
        # All that the parent's end would close of it.
        pool._parent_pipe.close_parents_end()
        assert eventually(lambda: pool._all[0].poll() is not None)
    pool.close()
