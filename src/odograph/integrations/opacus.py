"""Opacus: charge every step of private training before its noise is drawn, and refuse a step that does not fit.

Opacus counts a step after its noise was added. Here the account is charged first, for the noise multiplier of that
step, so that schedulers, and choices that depend on earlier releases, are covered.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping
from typing import Any, Final

from odograph.account import Account
from odograph.core.filters import ExactMeter
from odograph.core.fixed_point import Numeric, read
from odograph.core.guarantees import Mechanism
from odograph.core.mechanisms import subsampled_gaussian
from odograph.errors import InvalidArgument, UnprovenComposition, load_extra

__all__ = ["SETTINGS", "FilterAccountant", "charge_before_step", "cost_of", "sampling_rate"]

SETTINGS: Final = ("sample_rate",)  # further arguments of `cost_of`

_RAND_STEPS: Final = 2**24  # torch draws uniform numbers as multiples of 2^-24
_ROUNDING: Final = 1e-6  # relative, of a norm that torch computed in single precision


_accountants = load_extra("opacus.accountants.accountant")
_loaders = load_extra("opacus.data_loader")
_optimizers = load_extra("opacus.optimizers")
_samplers = load_extra("opacus.utils.uniform_sampler")
_torch = load_extra("torch")


def charge_before_step(
    optimizer: Any,  # noqa: ANN401  untyped library
    account: Account,
    loader: Any,  # noqa: ANN401  untyped library
    *,
    batch_size: int,
) -> FilterAccountant:
    """Make `optimizer.step()` charge the account before it draws noise; return the accountant with the charges.

    `batch_size` is the public number that a sum of gradients is divided by. Opacus would take it from the number of
    records, which is private. A refused step raises `BudgetExceeded` before anything is released: the weights do not
    change, the batch is dropped, and the next step, with more noise, may be admitted. A gradient that is not finite
    raises `UnprovenComposition` in the same way, and is not charged.

    Theorem: a step is one Poisson-subsampled Gaussian (Mironov, Talwar and Zhang (2019)); the policy's filter
        composes them.
    Assumes: the training uses this loader, and `loss.backward()` on its batches is all that sees records; sampling
        rate, batch size and clipping norms do not depend on the records, or on how many there are, other than through
        what was released before. Steps are skipped by `BatchMemoryManager` only, whose loop is left between batches
        only.
    """
    return FilterAccountant(account).attach(optimizer, loader, batch_size=batch_size)


class FilterAccountant(_accountants.IAccountant):  # type: ignore[misc, name-defined]  # untyped library
    """An Opacus accountant over an Odograph account: set `engine.accountant` to it before `make_private`.

    `history` holds the charges in Opacus's form: (noise multiplier, sampling rate, steps); `len()` is the number of
    steps taken. An account of 0.1.0 whose policy has a menu is charged for several steps of one setting at a time,
    before they are taken.
    """

    def __init__(self, account: Account) -> None:
        self.account = account
        self.history: list[tuple[float, float, int]] = []
        self._prepaid: Counter[tuple[float, float]] = Counter()
        # Accounts of 0.1.0 are charged whole blocks of a menu; others are charged step by step.
        meters = [meter for meter in account.compiled.meters if isinstance(meter, ExactMeter) and meter.parts == 1]
        self._batch_sizes = {name: block for meter in meters for name, block, _ in meter.charges}
        self._steps_taken = 0
        self._step_charged = False  # whether a step was charged that Opacus has not reported yet

    def attach(self, optimizer: Any, loader: Any, *, batch_size: int) -> FilterAccountant:  # noqa: ANN401  untyped library
        """Charge the account before this optimizer draws noise; see `charge_before_step`."""
        _check_optimizer(optimizer)
        if "add_noise" in vars(optimizer):
            raise UnprovenComposition("this optimizer is charged already; make another one for another account")
        rate = sampling_rate(loader)
        if isinstance(batch_size, bool) or not isinstance(batch_size, int) or batch_size < 1:
            raise InvalidArgument(f"batch_size must be a public positive integer (got {batch_size!r})")
        optimizer.expected_batch_size = batch_size
        clip, draw = optimizer.clip_and_accumulate, optimizer.add_noise
        norms: list[float] = []  # to which the gradients in the sum were clipped

        def record_and_clip() -> None:
            norms.append(_clipping_norm(optimizer))
            clip()

        def charge_and_draw() -> None:
            try:
                _check_step(optimizer, max(norms, default=math.inf))
                _check_finite(optimizer)
                self._charge(float(optimizer.noise_multiplier), rate)
            except BaseException:
                _drop_batch(optimizer)
                raise
            finally:
                norms.clear()
            draw()

        # Opacus calls add_noise once for every step that releases something: after a closure, not for skipped steps.
        optimizer.clip_and_accumulate, optimizer.add_noise = record_and_clip, charge_and_draw
        return self

    def step(self, *, noise_multiplier: float, sample_rate: float) -> None:
        """Called by Opacus after noise was drawn; raise before the weights change if the step was not charged."""
        if not self._step_charged:
            raise UnprovenComposition(
                f"a step with noise multiplier {noise_multiplier!r} and sampling rate {sample_rate!r} was not charged"
                " before its noise was drawn: attach this accountant to the optimizer with `charge_before_step`"
            )
        self._step_charged = False

    def get_epsilon(self, delta: float, *_: object, **__: object) -> float:
        """Return the epsilon that the policy promises, whenever the training stops."""
        policy = self.account.policy
        if policy.epsilon is None:
            raise UnprovenComposition(f"the policy must promise an epsilon (got {policy.target}); use reading()")
        if read(delta, "delta", InvalidArgument) < read(policy.delta, "Policy.delta"):
            raise UnprovenComposition(
                f"delta must be at least {policy.delta!r}, at which the policy promises its epsilon (got {delta!r})"
            )
        return float(policy.epsilon)

    def __len__(self) -> int:
        return self._steps_taken

    @classmethod
    def mechanism(cls) -> str:
        """Return Opacus's name for this kind of accountant."""
        return "odograph"

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Check that a checkpoint is of this kind. Nothing is read from it: the account knows what was spent."""
        if not isinstance(state_dict, Mapping) or state_dict.get("mechanism") != self.mechanism():
            raise InvalidArgument(f"state_dict must be the checkpoint of an Odograph accountant (got {state_dict!r})")

    def _charge(self, noise: float, rate: float) -> None:
        """Charge one step, or use one that was paid for with its batch.

        Theorem: the exact filter over a menu. The loss of a step that is paid for and not yet taken is independent of
            what is decided in between, so the same losses come in the order in which batches were charged; one that
            is never taken only lowers the divergence.
        Assumes: the account was charged for the whole batch of steps before the first of them.
        """
        setting = (noise, rate)
        if not self._prepaid[setting]:
            step = subsampled_gaussian(rate, noise)
            count = self._batch_sizes.get(step.name, 1)
            cost = step if count == 1 else subsampled_gaussian(rate, noise, count)
            with self.account.spending(cost, note=f"opacus: {cost}"):
                pass
            self._prepaid[setting] = count
            self.history.append((noise, rate, count))
        self._prepaid[setting] -= 1
        self._steps_taken += 1
        self._step_charged = True


def sampling_rate(loader: Any) -> float:  # noqa: ANN401  untyped library
    """Return the probability that a record is in a batch; raise for a loader without Poisson sampling.

    It is a little above the nominal rate, because torch's random numbers are multiples of 2^-24. A menu must list
    this rate, not the nominal one.
    """
    sampler: Any = getattr(loader, "batch_sampler", None)
    if not isinstance(loader, _loaders.DPDataLoader) or type(sampler) is not _samplers.UniformWithReplacementSampler:
        raise UnprovenComposition(
            "loader must do Poisson sampling, for which a step is priced (got a"
            f" {type(loader).__name__} with {type(sampler).__name__}): pass the DPDataLoader that"
            " make_private(poisson_sampling=True) returns"
        )
    if getattr(loader.collate_fn, "rand_on_empty", True):
        raise UnprovenComposition("rand_on_empty must be off: it puts a random record into an empty batch")
    if _torch.get_default_dtype() not in {_torch.float32, _torch.float64}:
        raise UnprovenComposition("torch's default dtype must be float32 or float64: the sampler draws numbers in it")
    rate = read(sampler.sample_rate, "sample_rate")
    return math.ceil(rate * _RAND_STEPS) / _RAND_STEPS


def cost_of(
    thing: Any,  # noqa: ANN401  untyped library
    *,
    neighbors: str = "add-remove",
    sample_rate: Numeric | None = None,
) -> Mechanism:
    """Return the cost of one step, from a pair (noise multiplier, sampling rate) or an optimizer's present state."""
    if neighbors != "add-remove":
        raise UnprovenComposition(
            f"subsampled Gaussians need a policy with neighbors='add-remove' (got {neighbors!r})"
        )
    if isinstance(thing, tuple) and len(thing) == 2:
        noise, sample_rate = thing
    else:
        _check_optimizer(thing)
        noise = thing.noise_multiplier
    if sample_rate is None:
        raise InvalidArgument("sample_rate must be given for an optimizer: pass sample_rate=sampling_rate(loader)")
    return subsampled_gaussian(sample_rate, noise)


def _check_optimizer(optimizer: Any) -> None:  # noqa: ANN401  untyped library
    """Raise unless a step is known to clip each gradient and to add its noise once to their sum."""
    if type(optimizer) not in {_optimizers.DPOptimizer, _optimizers.DPPerLayerOptimizer}:
        raise UnprovenComposition(
            f"no proof covers {type(optimizer).__name__}: adaptive clipping divides by the private size of a batch,"
            " ghost clipping is done outside the optimizer, and the workers of a distributed one would each charge;"
            " use make_private with clipping='flat' or 'per_layer' and grad_sample_mode='hooks' or 'functorch'"
        )


def _check_step(optimizer: Any, clipped: float) -> None:  # noqa: ANN401  untyped library
    """Raise unless the sum to be noised is that of one Poisson batch, clipped as the noise assumes."""
    batches = optimizer.accumulated_iterations
    if batches != 1:
        raise UnprovenComposition(
            f"the gradients of {batches} batches were accumulated for a step: a record can be in several of them, and"
            " no theorem covers that; use a larger batch, with BatchMemoryManager if it does not fit in memory"
        )
    if clipped > float(optimizer.max_grad_norm) * (1 + _ROUNDING):
        raise UnprovenComposition(
            f"gradients were clipped to {clipped!r}, but noise would be scaled to max_grad_norm"
            f" {optimizer.max_grad_norm!r}: change clipping norms only between steps, for all layers together"
        )


def _check_finite(optimizer: Any) -> None:  # noqa: ANN401  untyped library
    """Raise if the sum to be noised is not finite: noise does not hide that, and the weights would be lost."""
    if not all(bool(_torch.isfinite(parameter.summed_grad).all()) for parameter in optimizer.params):
        raise UnprovenComposition(
            "a gradient is NaN or infinite, so clipping does not bound it; the weights did not change, and the"
            " batch is dropped. Keep the loss finite (bounded features, a lower learning rate):"
            " whether this error occurs depends on the records, and is not private"
        )


def _clipping_norm(optimizer: Any) -> float:  # noqa: ANN401  untyped library
    norms = getattr(optimizer, "max_grad_norms", None)  # per layer
    return float(optimizer.max_grad_norm) if norms is None else math.hypot(*map(float, norms))


def _drop_batch(optimizer: Any) -> None:  # noqa: ANN401  untyped library
    """Drop the batch: a later step must not add its gradients to those of another batch."""
    for parameter in optimizer.params:
        parameter.grad = parameter.grad_sample = parameter.summed_grad = None
