"""Charges before noise, in real Opacus training. Draws are counted where Opacus makes its noise."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, Final, TypeAlias

import pytest

pytest.importorskip("torch", reason="torch is not installed: see `make test`")
pytest.importorskip("opacus", reason="torch is not installed: see `make test`")

import opacus.optimizers.optimizer as noise_source
import torch
from charge_history import charges
from opacus import PrivacyEngine
from opacus.accountants import RDPAccountant
from opacus.data_loader import DPDataLoader
from opacus.optimizers import DistributedDPOptimizer, DPOptimizer, FSDPOptimizerFastGradientClipping
from opacus.schedulers import ExponentialNoise
from opacus.utils.batch_memory_manager import BatchMemoryManager
from sklearn.datasets import load_breast_cancer
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset

import odograph as odo
from odograph.core.filters import ExactMeter
from odograph.errors import InvalidArgument
from odograph.integrations.opacus import FilterAccountant, charge_before_step, cost_of, sampling_rate

pytestmark = [
    pytest.mark.filterwarnings("ignore:Secure RNG turned off"),
    pytest.mark.filterwarnings("ignore:Full backward hook is firing"),
]

Untyped: TypeAlias = Any  # what an untyped library takes and gives

TABLE: Final = load_breast_cancer()
# Bounds of the columns, as if they were public: any fixed scaling will do here.
FEATURES: Final = torch.tensor(TABLE.data / TABLE.data.max(axis=0), dtype=torch.float32)
LABELS: Final = torch.tensor(TABLE.target)
RATE: Final = 1 / 16


def account(epsilon: float = 3) -> odo.Accountant:
    return odo.Accountant(odo.Policy(epsilon, 1e-6, filter="renyi"))


def adaptive_account() -> odo.Accountant:
    """An account whose orders suit the two noise multipliers of `train`."""
    plan = odo.dpsgd_policy(3, 1e-6, sample_rates=[RATE], noise_multipliers=[1.0, 1.5], filter="renyi")
    return odo.Accountant(plan.compiled)


class Training:
    """A linear model on the table, made private by Opacus."""

    def __init__(self, noise: float = 1.0, engine: Untyped = None, records: int = 569, **choices: Untyped) -> None:
        torch.manual_seed(11)
        data = TensorDataset(FEATURES[:records], LABELS[:records])
        plain = DataLoader(data, batch_size=math.ceil(records * RATE))
        self.module = torch.nn.Linear(30, 2)
        chosen = {"noise_multiplier": noise, "max_grad_norm": 1.0} | choices
        self.engine = engine or PrivacyEngine()
        made = self.engine.make_private(
            module=self.module,
            optimizer=torch.optim.SGD(self.module.parameters(), lr=0.5),
            data_loader=plain,
            **chosen,
        )
        self.model, self.optimizer, self.loader = made[0], made[1], made[-1]

    def weights(self) -> Untyped:
        return torch.cat([p.detach().flatten().clone() for p in self.module.parameters()])

    def backward(self, batch: Untyped) -> None:
        rows, labels = batch
        self.optimizer.zero_grad()
        torch.autograd.backward(cross_entropy(self.model(rows), labels))

    def step(self, batch: Untyped) -> None:
        self.backward(batch)
        self.optimizer.step()

    def steps(self, batches: Iterator[Untyped]) -> None:
        for batch in batches:
            self.step(batch)

    def batches(self) -> Iterator[Untyped]:
        while True:
            yield from self.loader


@pytest.fixture
def draws(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The standard deviations of the noise that Opacus drew, one per step."""
    drawn: list[float] = []
    own = noise_source._generate_noise  # noqa: SLF001  what is counted

    def counted(std: float, reference: Untyped, **kwargs: Untyped) -> Untyped:
        if reference.ndim == 2:  # once per step: the weights, not the bias
            drawn.append(std)
        return own(std=std, reference=reference, **kwargs)

    monkeypatch.setattr(noise_source, "_generate_noise", counted)
    return drawn


def train(training: Training, drawn: list[float], most: int = 200) -> None:
    """Train until refused; the noise of a step is chosen from the weights that were released before it."""
    last = 0.0
    for batch in training.batches():
        size = float(training.weights()[:5].norm())
        training.optimizer.noise_multiplier = 1.0 if size > last else 1.5
        last = size
        try:
            training.step(batch)
        except odo.BudgetExceeded:
            return
        assert len(drawn) < most


def charge_after_step(optimizer: Untyped, account: odo.Accountant, rate: float) -> None:
    """A broken twin: it charges where Opacus does, when the noise has been drawn."""
    optimizer.attach_step_hook(lambda o: account.spend(odo.subsampled_gaussian(rate, o.noise_multiplier)))


def test_adaptive_training_stops_with_one_charge_for_every_draw(draws: list[float]) -> None:
    own, training = adaptive_account(), Training()
    record = charge_before_step(training.optimizer, own, training.loader, batch_size=36)
    train(training, draws)
    assert 5 < len(draws) == own.totals.steps == len(record)
    assert set(draws) == {1.0, 1.5}  # both were chosen
    assert [noise for noise, _, _ in record.history] == draws
    assert [entry.cost for entry in charges(own)] == [odo.subsampled_gaussian(RATE, noise) for noise in draws]
    # Opacus's accountant of fixed parameters cannot see more than was promised for any parameters.
    theirs = RDPAccountant()
    theirs.history = list(record.history)
    assert 0.5 * 3 < theirs.get_epsilon(1e-6) <= 3


def test_charging_after_the_step_draws_once_too_often(draws: list[float]) -> None:
    own, training = adaptive_account(), Training()
    charge_after_step(training.optimizer, own, RATE)
    train(training, draws)
    assert len(draws) == own.totals.steps + 1


def test_a_refused_step_changes_nothing_and_a_noisier_one_still_works(draws: list[float]) -> None:
    own, training = account(1), Training()
    charge_before_step(training.optimizer, own, training.loader, batch_size=36)
    batches = training.batches()
    training.optimizer.noise_multiplier = 4.0
    training.step(next(batches))
    weights, drawn, spent = training.weights(), len(draws), own.totals
    training.optimizer.noise_multiplier = 0.5
    for _ in range(2):  # and again: a refusal leaves no trace
        with pytest.raises(odo.BudgetExceeded):
            training.step(next(batches))
    assert torch.equal(training.weights(), weights)
    assert (len(draws), own.totals) == (drawn, spent)
    assert all(p.grad is None and p.summed_grad is None for p in training.optimizer.params)
    with pytest.raises(ValueError, match="not initialized"):
        training.optimizer.step()  # the refused batch is gone
    assert own.totals == spent
    training.optimizer.noise_multiplier = 4.0
    training.step(next(batches))
    assert not torch.equal(training.weights(), weights)
    assert len(draws) == own.totals.steps == 2


def test_no_noise_has_no_price(draws: list[float]) -> None:
    own, training = account(), Training(noise=0.0)
    charge_before_step(training.optimizer, own, training.loader, batch_size=36)
    with pytest.raises(odo.errors.InvalidGuarantee):
        training.step(next(training.batches()))
    assert draws == []


def test_a_scheduler_is_charged_for_the_noise_of_each_step(draws: list[float]) -> None:
    own, training = account(8), Training(noise=4.0, max_grad_norm=0.5)
    record = charge_before_step(training.optimizer, own, training.loader, batch_size=36)
    scheduler = ExponentialNoise(training.optimizer, gamma=0.9)
    for batch, _ in zip(training.batches(), range(5), strict=False):
        training.step(batch)
        scheduler.step()
    assert [noise * 0.5 for noise, _, _ in record.history] == draws
    assert draws == pytest.approx([0.5 * 4.0 * 0.9**n for n in range(5)])
    assert [entry.cost for entry in charges(own)] == [
        odo.subsampled_gaussian(RATE, noise) for noise, _, _ in record.history
    ]


def test_a_menu_charges_step_by_step(draws: list[float]) -> None:
    plan = odo.dpsgd_policy(1, 1e-6, sample_rates=[RATE], noise_multipliers=[4.0, 12.0])
    own, training = odo.Accountant(plan.compiled), Training(noise=12.0)
    record = charge_before_step(training.optimizer, own, training.loader, batch_size=36)
    batches = training.batches()
    for n in range(1, 6):
        training.step(next(batches))
        assert own.totals.steps == n == len(draws)
    assert record.history == [(12.0, RATE, 1)] * 5


def test_a_menu_of_0_1_0_charges_a_block_before_its_first_step(draws: list[float]) -> None:
    plan = odo.dpsgd_policy(1, 1e-6, sample_rates=[RATE], noise_multipliers=[4.0, 12.0])
    meters = [
        replace(meter, parts=1, limit=(meter.limit or 0) // meter.parts) if isinstance(meter, ExactMeter) else meter
        for meter in plan.compiled.meters
    ]
    own, training = odo.Accountant(replace(plan.compiled, meters=tuple(meters))), Training(noise=12.0)
    blocks = {item.name: item.block for item in plan.policy.menu}
    small, block = (blocks[odo.subsampled_gaussian(RATE, noise).name] for noise in (4.0, 12.0))
    assert block > 1
    record = charge_before_step(training.optimizer, own, training.loader, batch_size=36)
    batches = training.batches()
    for n in range(1, 2 * block + 2):
        training.step(next(batches))
        assert own.totals.steps == math.ceil(n / block)
    assert {entry.cost for entry in charges(own)} == {odo.subsampled_gaussian(RATE, 12.0, block)}
    training.optimizer.noise_multiplier = 4.0
    training.step(next(batches))
    assert record.history == [(12.0, RATE, block)] * 3 + [(4.0, RATE, small)]
    training.optimizer.noise_multiplier = 12.0
    training.step(next(batches))  # paid for with its block
    assert len(record.history) == 4
    assert len(record) == len(draws) == 2 * block + 3
    assert all(sum(c for s, _, c in record.history if s == noise) >= draws.count(noise) for noise in (4.0, 12.0))
    training.optimizer.noise_multiplier = 5.0
    with pytest.raises(odo.UnprovenComposition):
        training.step(next(batches))  # not on the menu


def test_virtual_steps_draw_nothing_and_are_not_charged(draws: list[float]) -> None:
    own, training = account(8), Training(noise=4.0)
    charge_before_step(training.optimizer, own, training.loader, batch_size=36)
    physical = 0
    with BatchMemoryManager(
        data_loader=training.loader, max_physical_batch_size=8, optimizer=training.optimizer
    ) as loader:
        for batch in loader:
            assert len(batch[0]) <= 8
            training.step(batch)
            physical += 1
    assert len(draws) == own.totals.steps == 16  # batches in an epoch
    assert physical > 2 * 16


def stale_part_after_a_refusal(drop: Callable[[Untyped], None] | None, monkeypatch: pytest.MonkeyPatch) -> bool:
    """Refuse at the end of a virtual batch; say whether the next batch starts with something in its sum."""
    if drop is not None:
        monkeypatch.setattr("odograph.integrations.opacus._drop_batch", drop)
    own, training = account(1), Training(noise=0.3)
    charge_before_step(training.optimizer, own, training.loader, batch_size=36)
    splits = BatchMemoryManager(data_loader=training.loader, max_physical_batch_size=8, optimizer=training.optimizer)
    with splits as loader:
        batches = iter(loader)
        with pytest.raises(odo.BudgetExceeded):
            training.steps(batches)
        training.optimizer.zero_grad()
        stale = any(p.summed_grad is not None for p in training.optimizer.params)
        training.optimizer.noise_multiplier = 8.0
        while own.totals.steps == 0:
            training.step(next(batches))
    return stale


def test_a_refused_virtual_batch_is_not_added_to_the_next(monkeypatch: pytest.MonkeyPatch) -> None:
    assert not stale_part_after_a_refusal(None, monkeypatch)
    # Twin: without dropping the batch a record could be in the next sum twice.
    assert stale_part_after_a_refusal(lambda _: None, monkeypatch)


def test_accumulated_batches_are_refused(draws: list[float]) -> None:
    own, training = account(8), Training(noise=4.0)
    charge_before_step(training.optimizer, own, training.loader, batch_size=36)
    training.model.allow_grad_accumulation()
    batches = training.batches()
    training.backward(next(batches))
    rows, labels = next(batches)
    torch.autograd.backward(cross_entropy(training.model(rows), labels))
    assert training.optimizer.accumulated_iterations == 2
    with pytest.raises(odo.UnprovenComposition, match="2 batches"):
        training.optimizer.step()
    assert draws == []
    assert own.totals.steps == 0
    training.step(next(batches))
    assert own.totals.steps == 1


def test_an_empty_batch_is_charged_like_any_other(draws: list[float]) -> None:
    own, training = account(8), Training(noise=4.0)
    loader = DPDataLoader(training.loader.dataset, sample_rate=1 / 1024)
    charge_before_step(training.optimizer, own, loader, batch_size=1)
    sizes = []
    for batch, _ in zip(loader, range(40), strict=False):
        sizes.append(len(batch[0]))
        training.step(batch)
    assert 0 in sizes
    assert len(draws) == own.totals.steps == 40
    assert charges(own)[0].cost == odo.subsampled_gaussian(1 / 1024, 4.0)


@pytest.mark.parametrize("broken", [math.nan, math.inf])
@pytest.mark.parametrize("clipping", ["flat", "per_layer"])
def test_a_gradient_that_is_not_finite_is_an_error_before_the_step(
    draws: list[float], monkeypatch: pytest.MonkeyPatch, clipping: str, broken: float
) -> None:
    norm: Untyped = 1.0 if clipping == "flat" else [0.5, 0.5]
    own, training = account(8), Training(clipping=clipping, max_grad_norm=norm)
    record = charge_before_step(training.optimizer, own, training.loader, batch_size=36)
    batches = training.batches()
    rows, labels = next(batches)
    spoilt = rows.clone()
    spoilt[0, 0] = broken
    before = training.weights()
    with pytest.raises(odo.UnprovenComposition, match="NaN or infinite"):
        training.step((spoilt, labels))
    assert (own.totals.steps, len(record), draws) == (0, 0, [])
    assert torch.equal(training.weights(), before)
    training.step(next(batches))  # nothing of the dropped batch is left
    assert (own.totals.steps, len(record)) == (1, 1)
    assert torch.isfinite(training.weights()).all()
    monkeypatch.setattr("odograph.integrations.opacus._check_finite", lambda _: None)
    training.step((spoilt, labels))  # the twin without the check: charged, and the weights are lost
    assert own.totals.steps == 2
    assert torch.isnan(training.weights()).any()


def test_a_closure_runs_before_the_charge(draws: list[float]) -> None:
    own, training = account(8), Training(noise=4.0)
    charge_before_step(training.optimizer, own, training.loader, batch_size=36)
    batch = next(training.batches())

    def closure() -> float:
        training.backward(batch)
        training.optimizer.noise_multiplier = 6.0  # the noise that will be drawn is the one to pay for
        return 0.0

    training.optimizer.step(closure)
    assert draws == [6.0]
    assert charges(own)[0].cost == odo.subsampled_gaussian(RATE, 6.0)


def test_clipping_norms_may_change_between_steps_only(draws: list[float]) -> None:
    own, training = account(8), Training(noise=4.0)
    charge_before_step(training.optimizer, own, training.loader, batch_size=36)
    splits = BatchMemoryManager(data_loader=training.loader, max_physical_batch_size=8, optimizer=training.optimizer)
    with splits as loader:
        batches = iter(loader)
        training.step(next(batches))  # a part, clipped to 1
        training.optimizer.max_grad_norm = 0.1
        with pytest.raises(odo.UnprovenComposition, match="clipped to 1"):
            training.steps(batches)
        assert draws == []
        while not draws:
            training.step(next(batches))  # wholly clipped to 0.1
    assert draws == [pytest.approx(0.4)]


def test_clipping_by_layer_is_the_same_mechanism(draws: list[float]) -> None:
    own = account(8)
    training = Training(noise=4.0, clipping="per_layer", max_grad_norm=[0.6, 0.8])
    charge_before_step(training.optimizer, own, training.loader, batch_size=36)
    training.step(next(training.batches()))
    assert draws == [pytest.approx(4.0)]  # noise for the norm of both layers together, which is 1
    assert charges(own)[0].cost == odo.subsampled_gaussian(RATE, 4.0)
    training.optimizer.max_grad_norms = [6.0, 8.0]  # the layers' norms, and not that of the noise
    with pytest.raises(odo.UnprovenComposition, match="clipped to 10"):
        training.step(next(training.batches()))
    assert own.totals.steps == 1


ADAPTIVE: Final = {
    "clipping": "adaptive",
    "target_unclipped_quantile": 0.5,
    "clipbound_learning_rate": 0.2,
    "max_clipbound": 10.0,
    "min_clipbound": 0.1,
    "unclipped_num_std": 2.0,
}


@pytest.mark.parametrize("choices", [ADAPTIVE, {"grad_sample_mode": "ghost"}], ids=["adaptive", "ghost"])
def test_optimizers_that_are_another_mechanism_are_refused(choices: dict[str, Untyped]) -> None:
    training = Training(**choices)
    with pytest.raises(odo.UnprovenComposition, match=type(training.optimizer).__name__):
        charge_before_step(training.optimizer, account(), training.loader, batch_size=36)


def test_distributed_optimizers_and_strangers_are_refused() -> None:
    class Own(DPOptimizer):  # type: ignore[misc]  # untyped library
        """Somebody's own noise."""

    loader = Training().loader
    for cls in (DistributedDPOptimizer, FSDPOptimizerFastGradientClipping, Own):
        optimizer = object.__new__(cls)  # they cannot be made without a group of workers
        with pytest.raises(odo.UnprovenComposition, match=cls.__name__):
            charge_before_step(optimizer, account(), loader, batch_size=36)
    with pytest.raises(odo.UnprovenComposition, match="SGD"):
        charge_before_step(torch.optim.SGD(torch.nn.Linear(1, 1).parameters()), account(), loader, batch_size=36)


def test_an_optimizer_is_charged_to_one_account() -> None:
    training = Training()
    charge_before_step(training.optimizer, account(), training.loader, batch_size=36)
    with pytest.raises(odo.UnprovenComposition, match="charged already"):
        charge_before_step(training.optimizer, account(), training.loader, batch_size=36)


def test_a_loader_without_poisson_sampling_is_refused() -> None:
    training = Training(poisson_sampling=False)
    with pytest.raises(odo.UnprovenComposition, match="Poisson"):
        charge_before_step(training.optimizer, account(), training.loader, batch_size=36)
    filled = DPDataLoader(training.loader.dataset, sample_rate=0.1, rand_on_empty=True)
    with pytest.raises(odo.UnprovenComposition, match="rand_on_empty"):
        sampling_rate(filled)


@pytest.mark.parametrize("asked", [0.01, 1 / 49, 1 / 93, 0.3, 1 / 16, 1 - 2**-30, 1e-8])
def test_the_rate_is_the_probability_that_torch_really_samples_with(asked: float) -> None:
    # Every value that torch.rand can take is a multiple of 2^-24; count those that its comparison takes.
    near = round(asked * 2**24)
    values = torch.arange(max(0, near - 3), min(2**24, near + 4)).float() / 2**24
    taken = (max(0, near - 3) + int((values < asked).sum())) / 2**24
    loader = DPDataLoader(TensorDataset(FEATURES), sample_rate=asked)
    assert sampling_rate(loader) == taken >= asked
    draw = torch.rand(10_000)
    assert torch.equal(draw * 2**24, torch.floor(draw * 2**24))


def test_opacus_itself_counts_with_another_rate() -> None:
    # The loader samples with 1/93 and has int(1/(1/93)) = 92 batches, from which the engine takes a rate of 1/92.
    data = TensorDataset(FEATURES[:465], LABELS[:465])
    loader = DPDataLoader.from_data_loader(DataLoader(data, batch_size=5))
    assert len(loader) == 92
    assert 1 / 93 <= sampling_rate(loader) < 1 / 92


def test_a_half_precision_sampler_is_refused() -> None:
    loader = DPDataLoader(TensorDataset(FEATURES), sample_rate=0.1)
    torch.set_default_dtype(torch.bfloat16)
    try:
        with pytest.raises(odo.UnprovenComposition, match="dtype"):
            sampling_rate(loader)
    finally:
        torch.set_default_dtype(torch.float32)


def test_the_mean_is_over_a_public_number_of_records() -> None:
    fewer, more = Training(records=559), Training(records=560)
    assert (
        fewer.optimizer.expected_batch_size != more.optimizer.expected_batch_size
    )  # Opacus: from how many there are
    for training in (fewer, more):
        charge_before_step(training.optimizer, account(), training.loader, batch_size=36)
    assert fewer.optimizer.expected_batch_size == more.optimizer.expected_batch_size == 36
    for wrong in (0, 36.0, True, None):
        with pytest.raises(InvalidArgument, match="batch_size"):
            charge_before_step(Training().optimizer, account(), more.loader, batch_size=wrong)  # type: ignore[arg-type]  # what is tested


def test_an_engine_reports_the_promise_of_the_policy(draws: list[float], tmp_path: Path) -> None:
    own = account()
    engine = PrivacyEngine()
    engine.accountant = record = FilterAccountant(own)
    training = Training(noise=2.0, engine=engine)
    record.attach(training.optimizer, training.loader, batch_size=36)
    batches = training.batches()
    for _ in range(3):
        training.step(next(batches))
    assert len(engine.accountant) == len(draws) == 3
    assert engine.get_epsilon(1e-6) == engine.get_epsilon(1e-5) == 3
    with pytest.raises(odo.UnprovenComposition, match="delta"):
        engine.get_epsilon(1e-7)
    engine.save_checkpoint(path=tmp_path / "model", module=training.model)
    training.step(next(batches))
    engine.load_checkpoint(path=tmp_path / "model", module=training.model)
    assert len(record) == own.totals.steps == 4  # going back to old weights gives nothing back
    with pytest.raises(ValueError, match="checkpoint"):
        record.load_state_dict(RDPAccountant().state_dict())


def test_an_accountant_that_was_not_attached_stops_the_first_step() -> None:
    engine = PrivacyEngine()
    engine.accountant = FilterAccountant(account())
    training = Training(engine=engine)
    weights = training.weights()
    with pytest.raises(odo.UnprovenComposition, match="not charged"):
        training.step(next(training.batches()))
    assert torch.equal(training.weights(), weights)


def test_a_step_costs_one_subsampled_gaussian() -> None:
    training = Training(noise=2.0)
    expected = odo.subsampled_gaussian(RATE, 2.0)
    assert cost_of((2.0, RATE)) == expected
    assert cost_of(training.optimizer, sample_rate=sampling_rate(training.loader)) == expected
    charge_before_step(training.optimizer, account(), training.loader, batch_size=36)
    assert cost_of(training.optimizer, sample_rate=RATE) == expected
    with pytest.raises(InvalidArgument, match="sample_rate"):
        cost_of(training.optimizer)
    with pytest.raises(odo.UnprovenComposition, match="replace-one"):
        cost_of((2.0, RATE), neighbors="replace-one")


def test_a_charge_stands_when_the_step_raises(monkeypatch: pytest.MonkeyPatch) -> None:
    own, training = account(), Training(noise=2.0)
    charge_before_step(training.optimizer, own, training.loader, batch_size=36)

    def broken(**_: Untyped) -> Untyped:
        raise RuntimeError("no entropy")

    monkeypatch.setattr(noise_source, "_generate_noise", broken)
    with pytest.raises(RuntimeError):
        training.step(next(training.batches()))
    assert own.totals.steps == 1
