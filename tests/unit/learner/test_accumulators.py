"""Accumulators: pointing, moments, folding, the pool, and the exact sum."""

import contextlib
import itertools
import random
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file

from benchmarks.comparison.tensor_recorder import record_tensors
from megathunder.accumulator_keys import BATCH, AccumulatorKey, AccumulatorKind, FoldTerm
from megathunder.errors import MegathunderError, UserError
from megathunder.learner.accumulators.arithmetic import FixedPointArithmetic, FloatArithmetic
from megathunder.learner.accumulators.host import HostArithmetic, HostTraffic
from megathunder.learner.accumulators.layout import GradientLayout
from megathunder.learner.accumulators.store import AccumulatorStore
from megathunder.types import Fold

C0, C1 = AccumulatorKey(AccumulatorKind.CLASS, 0, 0), AccumulatorKey(AccumulatorKind.CLASS, 0, 1)
S0, S1 = AccumulatorKey(AccumulatorKind.MOMENT, 0, 0), AccumulatorKey(AccumulatorKind.MOMENT, 0, 1)


class FlatModel(torch.nn.Module):
    """Two parameters whose gradients lie in one flat buffer, as Megatron's wrapper lays them."""

    def __init__(self, dtype=torch.float32):
        super().__init__()
        self.a = torch.nn.Parameter(torch.zeros(3, 2, dtype=dtype))
        self.b = torch.nn.Parameter(torch.zeros(4, dtype=dtype))
        self.flat = torch.zeros(12, dtype=dtype)
        self.b.main_grad, self.a.main_grad = self.flat[:4], self.flat[4:10].view(3, 2)
        self.module, self.expert_parallel_buffers = self, []
        self.buffers = [SimpleNamespace(grad_data=self.flat)]

    def add(self, seed, scale=1.0):
        """What a backward pass does."""
        generator = torch.Generator().manual_seed(seed)
        for p in (self.a, self.b):
            p.main_grad.add_(scale * torch.randn(p.shape, generator=generator).to(p.dtype))


def make(*, exact=False, on_host=False, largest=4096.0):
    model = FlatModel()
    layout = GradientLayout([model])
    arithmetic = FixedPointArithmetic(layout, largest) if exact else FloatArithmetic(layout)
    return model, AccumulatorStore(layout, arithmetic, on_host=on_host)


def gradient_of(seed):
    model = FlatModel()
    model.add(seed)
    return model.flat.clone()


def value(store):
    if store.arithmetic.exact:
        store.arithmetic.to_float(store.batch, store.layout.homes)
    return store.layout.homes[0].clone()


def fold(store, *terms, free=()):
    store.fold(Fold(item=0, update=0, terms=tuple(FoldTerm(*t) for t in terms), free=tuple(free)))


@pytest.mark.parametrize("on_host", [False, True])
@pytest.mark.parametrize("exact", [False, True])
def test_classes_fold_to_the_coefficient_weighted_sum(exact, on_host):
    model, store = make(exact=exact, on_host=on_host)
    for seed, key in [(1, C0), (2, C1), (3, C0)]:
        with store.collect(key):
            model.add(seed)
    with store.collect(BATCH, coefficient=0.5):
        model.add(4, 1.0 if exact else 0.5)
    fold(store, (C0, BATCH, -0.75), (C1, BATCH, 1.25), free=(C0, C1))
    want = -0.75 * (gradient_of(1) + gradient_of(3)) + 1.25 * gradient_of(2) + 0.5 * gradient_of(4)
    torch.testing.assert_close(value(store), want, rtol=1e-5, atol=1e-6)
    assert not store.open_keys


@pytest.mark.parametrize("on_host", [False, True])
def test_moments_hold_the_sum_and_the_reward_weighted_sum(on_host):
    model, store = make(on_host=on_host)
    for seed, reward in [(1, 0.5), (2, -2.0)]:
        with store.collect(S0, features=(1.0, reward)):
            model.add(seed)
    torch.testing.assert_close(store.of(S0).flats[0], gradient_of(1) + gradient_of(2))
    torch.testing.assert_close(store.of(S1).flats[0], 0.5 * gradient_of(1) - 2.0 * gradient_of(2))


def test_worked_group_gives_the_same_gradient_in_all_arrival_orders():
    """r [1,0,0,1,1], g [2,-1,3,.5,-2], sample std, eps 1e-6, divided by 5: loss gradient .365148 (g of +s)."""
    rewards, scores = [1.0, 0.0, 0.0, 1.0, 1.0], [2.0, -1.0, 3.0, 0.5, -2.0]
    a = 1.0 / 0.547724
    for order in itertools.permutations(range(5)):
        model, store = make()
        for i in order:
            with store.collect(AccumulatorKey(AccumulatorKind.CLASS, 0, int(rewards[i]))):
                model.b.main_grad.add_(-scores[i])
        fold(store, (C0, BATCH, -0.6 * a), (C1, BATCH, 0.4 * a), free=(C0, C1))
        assert float(store.layout.homes[0][0]) / 5 == pytest.approx(0.365148, abs=2e-6)


@pytest.mark.parametrize("exact", [False, True])
def test_the_first_trajectory_that_lands_in_a_class_gives_it_its_accumulator(exact):
    model, store = make(exact=exact)
    owns = [AccumulatorKey(AccumulatorKind.PER_TRAJECTORY, 0, i) for i in range(3)]
    for seed, key in enumerate(owns):
        with store.collect(key):
            model.add(seed)
    first, held = store.of(owns[0]), store.bytes
    fold(store, (owns[0], C0, 1.0), (owns[1], C0, 1.0), free=owns[:2])
    assert store.of(C0) is first and store.bytes == held and store.open_keys == {C0, owns[2]}
    fold(store, (C0, BATCH, -0.75), (owns[2], BATCH, 1.0), free=(C0, owns[2]))
    want = -0.75 * (gradient_of(0) + gradient_of(1)) + gradient_of(2)
    torch.testing.assert_close(value(store), want, rtol=1e-5, atol=1e-6)
    assert not store.open_keys


def test_freed_accumulators_are_used_again_and_start_at_zero():
    model, store = make()
    with store.collect(C0):
        model.add(1)
    held = store.bytes
    fold(store, free=(C0,))
    with store.collect(C1):
        model.add(2)
    assert store.bytes == held
    torch.testing.assert_close(store.of(C1).flats[0], gradient_of(2))


@pytest.mark.parametrize("exact", [False, True])
def test_windows_add_up_and_one_of_weight_zero_adds_nothing(exact):
    """w = 0, loss w x: windows x = 2 and 3, then one of weight 0, give 5."""
    _, store = make(exact=exact)
    for x, weight in ((2.0, 1.0), (3.0, 1.0), (7.0, 0.0)):
        w = torch.zeros((), requires_grad=True)
        (w * x * (1.0 if exact else weight)).backward()
        with store.collect(BATCH, coefficient=weight):
            store.layout.parameters[0].main_grad.add_(w.grad)
    store.layout.point_home()
    value(store)
    assert store.layout.home_views[0].unique().tolist() == [5.0]


def test_two_classes_cost_eight_bytes_a_parameter_and_open_group():
    model, store = make()
    for key in (C0, C1):
        with store.collect(key):
            model.add(1)
    assert store.bytes == 8 * store.layout.elements


def test_folding_an_accumulator_that_does_not_exist_is_refused():
    _, store = make()
    with pytest.raises(MegathunderError, match="nothing was added"):
        fold(store, (C0, BATCH, 1.0))


def test_exact_sums_are_the_same_bits_in_any_order_and_split():
    rng = random.Random(0)
    jobs = [(seed, rng.choice([C0, C1])) for seed in range(12)]
    coefficients = {C0: -0.8164965, C1: 1.2247448}

    def run(order, direct):
        model, store = make(exact=True)
        for seed, key in order:
            if seed in direct:
                with store.collect(BATCH, coefficient=coefficients[key]):
                    model.add(seed)
            else:
                with store.collect(key):
                    model.add(seed)
        left = [(k, BATCH, coefficients[k]) for k in sorted(store.open_keys)]
        fold(store, *left, free=store.open_keys)
        return store

    first = run(jobs, direct=set())
    for trial in range(5):
        order = rng.sample(jobs, len(jobs))
        other = run(order, direct={s for s, _ in order if rng.random() < trial / 4})
        assert torch.equal(first.batch.flats[0], other.batch.flats[0])
        assert torch.equal(value(first), value(other))


def test_exact_sums_over_two_cells_are_those_of_one():
    one_model, one = make(exact=True)
    cells = [make(exact=True) for _ in range(2)]
    for seed in range(6):
        for model, store in ((one_model, one), cells[seed % 2]):
            with store.collect(BATCH, coefficient=0.3):
                model.add(seed)
    assert torch.equal(one.batch.flats[0], cells[0][1].batch.flats[0] + cells[1][1].batch.flats[0])


@pytest.mark.parametrize("bad", [1e9, float("inf"), float("nan")])
def test_exact_overflow_is_refused_with_bucket_and_value(bad):
    model, store = make(exact=True)
    with pytest.raises(UserError, match="bucket 0 received a value of"), store.collect(BATCH, coefficient=1.0):
        model.b.main_grad.add_(bad)


def test_exact_overflow_by_many_small_values_is_refused():
    model, store = make(exact=True, largest=8.0)
    with pytest.raises(UserError, match="exact_range"):
        for seed in range(100):
            with store.collect(BATCH, coefficient=1.0):
                model.add(seed)


def test_exact_moments_are_refused():
    model, store = make(exact=True)
    with pytest.raises(UserError, match="one class accumulator for each"), store.collect(S0, features=(1.0, 0.5)):
        model.add(1)


def test_the_update_ends_with_everything_at_zero_and_pointing_home():
    model, store = make()
    with store.collect(C0):
        model.add(1)
    store.abandon()
    assert float(store.layout.homes[0].abs().sum()) == 0 and not store.open_keys
    assert model.a.main_grad.data_ptr() == store.layout.home_views[0].data_ptr()


class Streams:
    """torch.cuda where every stream is the CPU, whose work is in order; events tell nothing apart."""

    class Stream:
        def wait_stream(self, other):
            assert other is not None

        def wait_event(self, event):
            assert event is not None

    class Event:
        def __init__(self, enable_timing):
            self.timed = enable_timing

        def record(self, stream):
            assert stream is not None

        def elapsed_time(self, end):
            assert self.timed and end.timed
            return 500.0

    stream = staticmethod(lambda stream: contextlib.nullcontext())
    current_stream = staticmethod(lambda: Streams.Stream())
    synchronize = staticmethod(lambda: None)


@pytest.mark.parametrize("piece", [1, 5, 64])
def test_sums_in_host_memory_pass_in_pieces_and_equal_those_on_the_device(piece, monkeypatch):
    model = FlatModel()
    layout = GradientLayout([model])
    traffic = HostTraffic(torch.device("cpu"), torch.float32, piece=piece, cuda=Streams)
    arithmetic = HostArithmetic(layout, traffic)
    monkeypatch.setattr(arithmetic, "zero", lambda a: setattr(a, "fresh", True) if a is not store.batch else a)
    store = AccumulatorStore(layout, arithmetic, on_host=True)
    _, _plain = make()
    for update in range(2):  # the second time accumulators come from the pool, full of the first time's numbers
        for seed, key in [(1, C0), (2, C1), (3, C0), (4, BATCH)]:
            with store.collect(key):
                model.add(seed + 10 * update)
        assert store.of(C0).fresh is False
        fold(store, (C0, BATCH, 0.7), (C1, BATCH, -0.4), free=(C0, C1))
        want = 0.7 * (gradient_of(1 + 10 * update) + gradient_of(3 + 10 * update))
        want += gradient_of(4 + 10 * update) - 0.4 * gradient_of(2 + 10 * update)
        assert torch.allclose(value(store), want, atol=1e-6)
        store.clear()
        assert not value(store).any()
    with store.collect(S0, features=(1.0, 0.5)):
        model.add(7)
    fold(store, (S0, C1, 2.0), (S1, C1, 4.0), (C1, BATCH, 1.0), free=(S0, S1, C1))
    assert torch.allclose(value(store), 4 * gradient_of(7), atol=1e-6)
    assert len(store._scratches) == 2 and traffic.exposed_s() > 0


def test_the_recorded_gradient_of_an_update_that_nothing_survived_is_0(tmp_path):
    record_tensors(tmp_path / "kept", ["w"], [torch.zeros(3)], divisor=0.0)
    assert load_file(tmp_path / "kept")["w"].tolist() == [0.0] * 3, "not 0 / 0"
