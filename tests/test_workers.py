"""Threads where cores are shared with other processes."""

import threading

import pytest
import torch

import tensorbed as tb
from tensorbed import workers
from tensorbed.decompose.clusters import k_means
from tensorbed.structures.dense import Dense
from tensorbed.workers import Workers, crowded, one_thread_if_crowded

LARGE = 2**20


@pytest.fixture
def two_threads():
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


def threads_of_a_new_thread():
    seen = []
    thread = threading.Thread(target=lambda: seen.append(torch.get_num_threads()))
    thread.start()
    thread.join()
    return seen[0]


@pytest.mark.usefixtures("two_threads")
class TestThreads:
    def test_each_worker_has_one_thread_and_nobody_else_loses_theirs(self):
        with Workers() as pool:
            assert pool.map(lambda piece: (piece, torch.get_num_threads()), range(5)) == [(n, 1) for n in range(5)]
            assert torch.get_num_threads() == 2
            assert threads_of_a_new_thread() == 2
        assert torch.get_num_threads() == 2

    def test_workers_record_no_gradients(self):
        weight = torch.ones(3, requires_grad=True)
        with Workers() as pool:
            assert [product.requires_grad for product in pool.map(lambda n: weight * n, range(2))] == [False, False]

    def test_an_error_in_a_piece_is_raised(self):
        with Workers() as pool, pytest.raises(ZeroDivisionError):
            pool.map(lambda n: 1 // n, [1, 0])

    def test_fits_are_held_to_one_thread_only_where_the_cores_are_crowded(self, monkeypatch):
        seen = []
        monkeypatch.setattr(
            Dense, "fit", lambda *given, fit=Dense.fit: seen.append(torch.get_num_threads()) or fit(*given)
        )
        table = torch.randn(LARGE // 64, 64)
        for state in (True, False):
            monkeypatch.setattr(workers, "crowded", lambda state=state: state)
            tb.Embedding.from_pretrained(table, tb.Dense())
        assert seen == [1, 2]
        assert torch.get_num_threads() == 2

    def test_workers_keep_their_number_in_a_crowd(self, monkeypatch):
        monkeypatch.setattr(workers, "crowded", lambda: True)
        started = threading.Barrier(2, timeout=60)  # passed by two pieces at once or not at all
        with one_thread_if_crowded(LARGE), Workers() as pool:
            assert sorted(pool.map(lambda _: started.wait(), range(2))) == [0, 1]
            assert torch.get_num_threads() == 1

    def test_the_number_comes_back_after_an_error(self, monkeypatch):
        monkeypatch.setattr(workers, "crowded", lambda: True)
        with pytest.raises(RuntimeError, match="inside"), one_thread_if_crowded(LARGE):
            raise RuntimeError("inside")
        assert torch.get_num_threads() == 2

    def test_looking_changes_no_number(self):
        assert crowded() in (True, False)
        assert torch.get_num_threads() == 2

    def test_clusters_do_not_depend_on_the_number_of_workers(self):
        points = torch.randn(9000, 3, generator=torch.Generator().manual_seed(0))
        places, centres = k_means(points, 20, 6)
        torch.set_num_threads(1)
        places_alone, centres_alone = k_means(points, 20, 6)
        assert torch.equal(places, places_alone)
        assert torch.equal(centres, centres_alone)
