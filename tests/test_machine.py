"""What the machine is asked, and where its threads are kept."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from phasicrl.machine import Companion, num_cores, thread_ids

needs_affinity = pytest.mark.skipif(
    not hasattr(os, "sched_setaffinity") or num_cores() < 2, reason="needs Linux and two cores to tell them apart"
)


@contextmanager
def a_waiting_thread() -> Iterator[int]:
    done = threading.Event()
    thread = threading.Thread(target=done.wait)
    before = thread_ids()
    thread.start()
    (number,) = thread_ids() - before
    assert number == thread.native_id
    try:
        yield number
    finally:
        done.set()
        thread.join()


@needs_affinity
def test_a_companion_goes_where_its_caller_is_and_nobody_else_is_moved() -> None:
    cores = os.sched_getaffinity(0)
    with a_waiting_thread() as worker, a_waiting_thread() as other:
        companion = Companion({worker})
        assert os.sched_getaffinity(worker) == cores, "it moves when it is told to follow, not before"
        try:
            for core in sorted(cores)[:2] * 2:
                os.sched_setaffinity(0, {core})
                companion.follow()
                assert os.sched_getaffinity(worker) == {core}
                assert os.sched_getaffinity(other) == cores
        finally:
            os.sched_setaffinity(0, cores)
        companion.follow()
        assert os.sched_getaffinity(0) == cores


@needs_affinity
def test_of_several_companions_those_that_have_ended_do_not_hold_the_others() -> None:
    cores = os.sched_getaffinity(0)
    with a_waiting_thread() as worker:
        with a_waiting_thread() as ended:
            companion = Companion({worker, ended})
        try:
            for core in sorted(cores)[:2]:
                os.sched_setaffinity(0, {core})
                companion.follow()
                assert os.sched_getaffinity(worker) == {core}
        finally:
            os.sched_setaffinity(0, cores)
    companion.follow()


def test_nobody_to_follow_is_no_error() -> None:
    Companion(set()).follow()
