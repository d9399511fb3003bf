"""A study as data: a list of stages, each a table of sides, settings and seeds.

A plan is a file of Python with ``stages(corpus) -> list[Stage]``; ``examples/my_plan.py`` is one.
"""

import copy
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from diff_transformer.checks import require_known
from diff_transformer.errors import UserError
from diff_transformer.lab.record import Record
from diff_transformer.lab.spec import RunSpec, everything, require_drawn, side_model, with_seed
from diff_transformer.lab.user_code import load_file
from diff_transformer.train.config import RunConfig, override

Choices = Mapping[str, float]  # the learning rate of each side, chosen by sweeps
Rate = float | str | Sequence[float]  # one, one that a sweep chose, or several
SWEPT = "swept"
FIGURES = Path(__file__).resolve().parents[3] / "figures"  # in a clone of the repository, whose studies are there
PLANS = {"ablation": Path(__file__).parent / "recipes" / "ablation.py"}


@dataclass(frozen=True)
class Stage:
    """Runs with each seed, in each setting, of each side, at each of its learning rates, in this order.

    Attributes:
        settings: configurations by name.
        sides: fields of the model, by name of the side. With ``"variant"``, a name of ``model/matching.py``, sizes are
            changed so that the cost stays equal. A key with a dot is another setting, as ``"train.weights"``.
        seeds: training seeds.
        rates: learning rates of every side, or by side: a number; several; ``SWEPT``, which the last sweep of the side
            before this stage chose; or the name of another side, whose swept rate it takes. None: the settings' own.
        folder: of a run's setting, from ``setting`` and ``rate``. Pages and tables leave out what begins with "sweep/".
        measure: experiments, as in ``RunSpec``; None: those of a comparison.
        score: makes the stage a sweep: each side's rate is that of the lowest score. Later stages wait for it.

    Raises:
        UserError: for settings or sides that are no dictionary, or a folder that names a rate which a sweep is yet to
            choose.
    """

    settings: Mapping[str, RunConfig]
    sides: Mapping[str, Mapping[str, Any]]
    seeds: Iterable[int]
    rates: Rate | Mapping[str, Rate] | None = None
    folder: str = "{setting}"
    measure: tuple[str, ...] | None = None
    score: Callable[[Record], float] | None = None

    def __post_init__(self):
        _require_dictionary("settings", self.settings, '{"main": config}')
        _require_dictionary("sides", self.sides, '{"diff": {"attention": "diff"}}')
        for side, fields in self.sides.items():
            _require_dictionary(f"side {side!r}", fields, '{"attention": "diff"}')
        object.__setattr__(self, "seeds", tuple(self.seeds))
        rates = self.rates.values() if isinstance(self.rates, Mapping) else [self.rates]
        if "{rate" in self.folder and any(isinstance(rate, str) for rate in rates):
            raise UserError(f"folder is {self.folder!r}, but a sweep chooses the rate; leave {{rate}} out")

    def specs(self, swept: Choices) -> list[RunSpec]:
        """The runs, at the rates that sweeps chose.

        Raises:
            UserError: for a side that no sweep before has had, or that its setting does not support.
        """
        return [
            self._spec(setting, side, seed, rate)
            for seed in self.seeds
            for setting in self.settings
            for side in self.sides
            for rate in self._rates(setting, side, swept)
        ]

    def _rates(self, setting: str, side: str, swept: Choices) -> Iterable[float]:
        if isinstance(self.rates, Mapping):
            require_known("side of rates", side, self.rates)
        rates: Rate | None = self.rates[side] if isinstance(self.rates, Mapping) else self.rates
        if rates is None:
            rates = self.settings[setting].optim.lr
        elif isinstance(rates, str):
            of = side if rates == SWEPT else rates
            try:
                rates = swept[of]
            except KeyError:
                raise UserError(f"{side} takes the rate of a sweep of {of}, and no stage before is one") from None
        return (rates,) if isinstance(rates, int | float) else rates

    def _spec(self, setting: str, side: str, seed: int, rate: float) -> RunSpec:
        config, fields = copy.deepcopy(self.settings[setting]), dict(self.sides[side])
        variant = fields.pop("variant", None)
        others = {key: fields.pop(key) for key in self.sides[side] if "." in key}
        if "train.initial_model" not in others:
            require_drawn(config)
        config.optim.lr = rate
        config.model |= fields
        if variant is not None:
            config.model |= side_model(config, variant)
        config = with_seed(override(config, [f"{key}={json.dumps(value)}" for key, value in others.items()]), seed)
        measure = everything(config) if self.measure is None else self.measure
        return RunSpec(self.folder.format(setting=setting, rate=rate), side, seed, config, measure, may_diverge=True)


def _require_dictionary(what: str, value: Any, like: str) -> None:
    if not isinstance(value, Mapping):
        raise UserError(f"{what} of a Stage is of type {type(value).__name__}; give a dictionary, such as {like}")


def load_stages(name: str, corpus: str = "python", assignments: Sequence[str] = ()) -> list[Stage]:
    """The stages of a plan: of a file, or in a clone ``figures/NAME/plan.py``; ``corpus`` as ``data.corpus`` of a run.

    Args:
        assignments: ``"key=value"``, which change the configurations. What the plan says of sides and rates stays.

    Raises:
        ValueError: if there is no such plan, the file holds none, or for an unknown key or a wrong value.
    """
    path = Path(name)
    if not (name.endswith(".py") and path.is_file()):
        known = PLANS | {plan.parent.name: plan for plan in sorted(FIGURES.glob("*/plan.py"))}
        require_known("study", name, known, ", or the Python file of a plan")
        path = known[name]
    module = load_file(path)
    if not callable(getattr(module, "stages", None)):
        raise UserError(f"{name} is no plan; give it stages(corpus), which returns a list of Stage")
    stages = list(module.stages(corpus))
    if not stages:
        raise UserError(f"{name} is an empty plan; its stages(corpus) returned no Stage")

    def configured(config: RunConfig) -> RunConfig:
        own = f"data.corpus={json.dumps(config.data.corpus)}"  # assigned, so that a prepared one decides the vocabulary
        return override(config, [own, *assignments])

    return [
        replace(stage, settings={name: configured(config) for name, config in stage.settings.items()})
        for stage in stages
    ]
