"""What a scenario says of speculative decoding: vLLM's `--speculative-config`, and how drafts are
accepted, which no engine is told and a simulation must be."""

from itertools import pairwise
from typing import Annotated, Any, Literal, Self

from pydantic import BeforeValidator, Field, model_validator

from servecast.scenarios.fields import Count, Flag, Model, Name, Pause, Real, Tokens, fault

#: Drafts of one round at most.
MOST_DRAFTS = 128

Share = Annotated[float, Field(strict=True, ge=0, le=1, allow_inf_nan=False)]
Drafts = Annotated[int, Field(strict=True, ge=0, le=MOST_DRAFTS)]
Logit = Annotated[float, Field(strict=True, ge=-30, le=30, allow_inf_nan=False)]
Temperature = Annotated[float, Field(strict=True, ge=0, le=2, allow_inf_nan=False)]
Factor = Annotated[float, Field(strict=True, gt=0, le=2, allow_inf_nan=False)]


class _Acceptance(Model):
    """How the drafts of a round are accepted."""

    temperature: Temperature = Field(
        default=0.0, description="Sampling temperature of the requests, 0 to 2."
    )
    temperature_slope: Annotated[float, Field(strict=True, ge=-1, le=1)] | None = Field(
        default=None,
        description="Change of every rate of acceptance for each unit of temperature, as a share: "
        "-0.2 leaves 0.8 of it at a temperature of 1.",
    )
    by_temperature: (
        Annotated[tuple[tuple[Temperature, Factor], ...], Field(min_length=1, max_length=100)]
        | None
    ) = Field(
        default=None,
        description="[temperature, factor of every rate] pairs, with straight lines between them.",
    )

    @model_validator(mode="after")
    def _warmth(self) -> Self:
        table, slope = self.by_temperature, self.temperature_slope
        if table is not None and slope is not None:
            raise fault("by_temperature", "give it or temperature_slope, not both")
        if self.temperature > 0 and table is None and slope is None:
            raise fault("temperature", "needs by_temperature or temperature_slope to mean anything")
        if table is not None and any(a >= b for (a, _), (b, _) in pairwise(table)):
            raise fault("by_temperature", "temperatures must rise")
        return self

    @property
    def factor(self) -> float:
        """Of every conditional rate, at this temperature."""
        if self.temperature_slope is not None:
            return max(0.0, 1.0 + self.temperature_slope * self.temperature)
        if self.by_temperature is None:
            return 1.0
        from numpy import interp

        warm, factors = zip(*self.by_temperature, strict=True)
        return float(interp(self.temperature, warm, factors))


class _Matching(_Acceptance):
    match: Share | None = Field(
        default=None,
        description="N-gram and suffix: share of the rounds without an accepted draft in which one "
        "is proposed and verified for nothing. Left out: 0.2.",
    )


class IidAcceptance(_Matching):
    """Every draft alike."""

    kind: Literal["iid"] = Field(description="One rate for all drafts of all requests.")
    alpha: Share = Field(
        description="Probability of a draft, given that those before it were accepted."
    )


class PositionAcceptance(_Matching):
    """Rates by position."""

    kind: Literal["per_position"] = Field(description="A rate for each position of a draft.")
    rates: Annotated[tuple[Share, ...], Field(min_length=1, max_length=MOST_DRAFTS)] = Field(
        description="Probability of each position, given that those before it were accepted; the "
        "last holds for all that follow."
    )


class MeanAcceptance(_Acceptance):
    """No luck: every round the mean, to see what luck does."""

    kind: Literal["mean"] = Field(description="Every round accepts the mean.")
    acceptance_length: Annotated[float, Field(strict=True, ge=1, le=MOST_DRAFTS + 1)] = Field(
        description="Tokens that a round emits, the bonus token included; where k drafts cannot "
        "give as many, k + 1."
    )


class HierarchicalAcceptance(_Matching):
    """Requests differ: each has a quality of its own."""

    kind: Literal["hierarchical"] = Field(
        description="Rates by position around a quality of each request, fitted to recordings."
    )
    fit: Name | None = Field(
        default=None,
        description="A bundled fit (docs/speculation.md lists them), or a file that `servecast "
        "fit-acceptance --json` has written, as file.json:method; or give rates.",
    )
    rates: Annotated[tuple[Share, ...], Field(min_length=1, max_length=MOST_DRAFTS)] | None = Field(
        default=None, description="By position, for a request of middling quality."
    )
    quality: Annotated[tuple[Logit, ...], Field(min_length=2, max_length=1000)] | None = Field(
        default=None,
        description="Quantiles of a request's offset of the logit, at equal steps of probability.",
    )
    persistence: Share | None = Field(
        default=None,
        description="Probability that a round's first draft fares as that of the round before.",
    )
    depth: Share | None = Field(
        default=None, description="Share of its quality that a request's later positions have."
    )

    @model_validator(mode="after")
    def _fit_or_rates(self) -> Self:
        if (self.fit is None) == (self.rates is None):
            raise fault("fit", "give exactly one of fit and rates")
        own = (self.quality, self.persistence, self.depth)
        if self.fit is not None and any(value is not None for value in own):
            raise fault("fit", "brings quality, persistence and depth with it")
        return self


class TraceAcceptance(_Matching):
    """Accepted lengths as they were recorded."""

    kind: Literal["trace"] = Field(description="Recorded at every output position.")
    path: Name = Field(
        description="JSONL, a request a line, relative to the scenario's folder: "
        "acc_len_<method>, tokens that a round would emit at each output position."
    )
    recorded: Name | None = Field(
        default=None,
        description="Which acc_len_<method> to take; speculative_config's method when left out.",
    )


OneAcceptance = Annotated[
    IidAcceptance | PositionAcceptance | MeanAcceptance | HierarchicalAcceptance | TraceAcceptance,
    Field(discriminator="kind"),
]


class Domain(Model):
    """One kind of text."""

    weight: Real = Field(description="Share of the requests, relative to the other domains.")
    acceptance: OneAcceptance = Field(description="How its drafts are accepted.")


class MixAcceptance(Model):
    """Several kinds of text in one stream."""

    kind: Literal["mix"] = Field(description="Each request is of one domain, by weight.")
    domains: Annotated[tuple[Domain, ...], Field(min_length=1, max_length=100)] = Field(
        description="What there is: chat, code, mathematics, summaries."
    )


Acceptance = Annotated[
    IidAcceptance
    | PositionAcceptance
    | MeanAcceptance
    | HierarchicalAcceptance
    | TraceAcceptance
    | MixAcceptance,
    Field(discriminator="kind"),
]


class AdaptiveDrafts(Model):
    """A request's number of drafts follows its own acceptance."""

    window: Count = Field(default=10, description="Rounds after which it is looked at.")
    raise_above: Share = Field(
        default=0.8, description="Share of accepted drafts above which one token more is drafted."
    )
    lower_below: Share = Field(default=0.5, description="Share below which it is one less.")
    min_tokens: Annotated[int, Field(strict=True, ge=1, le=MOST_DRAFTS)] = Field(
        default=4, description="Fewest drafts."
    )
    max_tokens: Annotated[int, Field(strict=True, ge=1, le=MOST_DRAFTS)] = Field(
        default=8, description="Most drafts."
    )

    @model_validator(mode="after")
    def _ordered(self) -> Self:
        if self.max_tokens < self.min_tokens:
            raise fault("max_tokens", f"must be at least min_tokens ({self.min_tokens})")
        if self.lower_below > self.raise_above:
            raise fault("lower_below", f"must not be above raise_above ({self.raise_above:g})")
        return self


class OwnDevice(Model):
    """The drafter on devices of its own, beside the target's."""

    hardware: Name = Field(description="Catalogue name, or path of a YAML file with the facts.")
    link_gb_per_s: Real = Field(default=25.0, description="To the target's devices, GB/s.")
    link_latency_s: Pause = Field(default=20e-6, description="Of one message, seconds.")


def _method(value: Any) -> Any:
    """vLLM names the MTP layers of each family; they are one method."""
    return "mtp" if isinstance(value, str) and value.endswith("_mtp") else value


Method = Annotated[
    Literal["draft_model", "eagle", "eagle3", "mtp", "medusa", "ngram", "suffix"],
    BeforeValidator(_method),
]


class SpeculativeConfig(Model):
    """vLLM's `--speculative-config` under its own names, and what goes beyond it: `acceptance`,
    `draft_layers`, `draft_tree`, `draft_device`, and the rules for when and how much to draft."""

    method: Method | None = Field(
        default=None, description="What drafts; draft_model where a model is given and no method."
    )
    model: Name | None = Field(
        default=None,
        description="Draft model or EAGLE head: catalogue name, or path of a config.json. A head "
        "left out is one decoder layer of the target's width.",
    )
    num_speculative_tokens: Drafts | None = Field(
        default=None,
        description="Drafts of a round; 0 for none at all, whatever other rules say.",
    )
    draft_tensor_parallel_size: Count | None = Field(
        default=None, description="1, or the target's; the target's when left out."
    )
    quantization: Name | None = Field(
        default=None, description="Of the draft model's weights: fp8, int8 or any of vLLM's."
    )
    prompt_lookup_max: Count | None = Field(
        default=None, description="Longest n-gram (acceptance says what it finds)."
    )
    prompt_lookup_min: Count | None = Field(
        default=None, description="Shortest n-gram (acceptance says what it finds)."
    )
    parallel_drafting: Flag = Field(default=False, description="All tokens of a draft in one pass.")
    num_speculative_tokens_per_batch_size: (
        Annotated[tuple[tuple[Count, Count, Drafts], ...], Field(min_length=1, max_length=1000)]
        | None
    ) = Field(default=None, description="[first, last, drafts] by sequences in the batch.")
    disable_by_batch_size: Count | None = Field(
        default=None, description="No drafts in batches above it."
    )
    draft_layers: Count | None = Field(
        default=None,
        description="Draft with the target's first layers (a self-draft), in place of a model.",
    )
    draft_tree: Annotated[tuple[Tokens, ...], Field(min_length=1, max_length=32)] | None = Field(
        default=None,
        description="Candidates at each depth of a draft, in place of a chain of "
        "num_speculative_tokens. Acceptance is then by depth of the tree.",
    )
    draft_device: OwnDevice | None = Field(
        default=None, description="Draft on another device, ahead of the verification."
    )
    acceptance: Acceptance | None = Field(
        default=None,
        description="How drafts are accepted; a bundled fit of the method's if left out.",
    )
    adaptive: AdaptiveDrafts | None = Field(
        default=None, description="Let each request's number of drafts follow its acceptance."
    )
    goodput: Flag = Field(
        default=False,
        description="Choose the number of drafts each step, up to num_speculative_tokens, by "
        "predicted tokens a second.",
    )
    min_sequence_tokens: Annotated[int, Field(strict=True, ge=0)] = Field(
        default=0, description="No drafts for a sequence up to so long, prompt and output."
    )
    min_running_requests: Annotated[int, Field(strict=True, ge=0)] = Field(
        default=0, description="No drafts while fewer requests run."
    )

    @model_validator(mode="after")
    def _complete(self) -> Self:
        if self.method is None and self.model is None and self.draft_layers is None:
            raise fault("method", "required key is missing (or give a draft model)")
        if self.num_speculative_tokens is None and self.draft_tree is None:
            raise fault("num_speculative_tokens", "required key is missing (or give draft_tree)")
        if self.num_speculative_tokens is not None and self.draft_tree is not None:
            raise fault("draft_tree", "not together with num_speculative_tokens")
        if self.draft_tree is not None and self.drafting_method in ("ngram", "suffix"):
            raise fault("draft_tree", f"not with {self.drafting_method}")
        if self.draft_tree is not None and self.parallel_drafting:
            raise fault("draft_tree", "not with parallel_drafting")
        ranges = self.num_speculative_tokens_per_batch_size or ()
        ends = [end for first, last, _ in ranges for end in (first, last)]
        if any(b < a for a, b in pairwise(ends)) or any(
            later[0] <= last for (_, last, _), later in pairwise(ranges)
        ):
            raise fault("num_speculative_tokens_per_batch_size", "ranges must rise and not overlap")
        if self.draft_tree is not None and sum(self.draft_tree) > MOST_DRAFTS:
            raise fault("draft_tree", f"{sum(self.draft_tree)} drafts, at most {MOST_DRAFTS}")
        rules = {
            "adaptive": self.adaptive is not None,
            "goodput": self.goodput,
            "num_speculative_tokens_per_batch_size": (
                self.num_speculative_tokens_per_batch_size is not None
            ),
        }
        given = [name for name, is_given in rules.items() if is_given]
        if len(given) > 1:
            raise fault(given[1], f"not together with {given[0]}: both choose the number of drafts")
        if given and self.draft_tree is not None:
            raise fault(given[0], "not with a draft_tree, whose shape is fixed")
        return self

    @property
    def drafting_method(self) -> str:
        """The method, where a model alone stands for one."""
        return self.method or "draft_model"

    @property
    def widths(self) -> tuple[int, ...]:
        """Candidates at each depth; empty where nothing is drafted."""
        return self.draft_tree or (1,) * (self.num_speculative_tokens or 0)
