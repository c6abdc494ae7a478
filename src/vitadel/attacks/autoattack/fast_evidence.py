"""What the stages of `autoattack-fast` say about its number: signs of masked gradients, weaker doubts, thin evidence.

The limits come from honest models: those of the zoo, pretrained ViTs on ImageNet, small CNNs (docs/results.md).
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from vitadel.attacks.attention_scaling.gaps import SATURATED
from vitadel.attacks.autoattack.sentinel_probe import KEPT, ONE_HOT
from vitadel.attacks.gain_ratio import FEW, GAINS, SCALES, STEP, WILD, are_broken, mean_over_steps
from vitadel.attacks.per_sample import SampleInfo
from vitadel.attacks.wrappers import StageResult
from vitadel.statistics import binomial_tail, exceeds_share
from vitadel.two_phase import total_broken

STAGES = (
    "clean",
    "cross-entropy",
    "probability margin",
    "targets",
    "best targets",
    "restarts",
    "kept alive",
    "sentinel",
    "escalation",
)
"""The stages that may fool a sample; the sample info `fell_in` is a position in this list, or -1 if none did."""

SEARCH, AUDIT, WHOLE_SEARCH, PROBE = "search", "audit", "whole-search", "probe"
SEARCHES = (SEARCH, AUDIT, WHOLE_SEARCH)
FAB_SENTINEL, SQUARE_SENTINELS = "fab-sentinel", ("square-sentinel-1", "square-sentinel-2")
ON_SENTINELS = (PROBE, FAB_SENTINEL, *SQUARE_SENTINELS)
"""Names of the members in results; AutoAttack's members have their own names."""

SQUARE_MARGIN = "square_margin"
"""The sample info of Square as a sentinel: the largest margin that it reached."""

_CONVERGED = 0.003  # share of the robust samples that the last restarts may still break
_UNFINISHED = 0.02  # the same share, beyond which the search is too weak for this model
_MISLED = 0.12  # share of the samples that may withstand the cross-entropy and not other losses
_LUCKY = 0.02  # share of the sentinels on which Square may come closer to the boundary than the gradients
_MASKED = 0.2  # the same share of a masked model, or more
_ALARM, _CLEAR = 0.01, 0.05  # chance of an alarm at the first share, and of none at the second
_AHEAD = 0.01  # Square is closer by more than this share of the margin
_KEPT = 0.35  # free steps of honest models deliver more than this share of their promise
_TARGETED = 0.2  # share of the samples left by other losses that runs towards targets may break
_TOLERATED = 0.002  # share of the samples that may be missed by giving up
_MISSED = 0.05  # chance that more was missed than the bound says
_NEGLIGIBLE = 0.01  # so small a share of robust samples needs no further evidence


@dataclass(frozen=True)
class FastEvidence:
    """The results of the stages so far, by name."""

    results: Mapping[str, StageResult]

    @cached_property
    def count(self) -> dict[str, int]:
        """How many samples each stage of the search fooled, by the names in `STAGES`."""
        fell = self._info("fell_in")
        return {stage: int((fell == number).sum()) for number, stage in enumerate(STAGES)}

    @property
    def attacked(self) -> int:
        return len(self._search.samples)

    @property
    def searched(self) -> int:
        """The samples that are still correct after the search."""
        return int((~self._search.fooled).sum())

    @property
    def broken_by_sentinels(self) -> int:
        return sum(int(result.fooled.sum()) for result in self._sentinels)

    @property
    def robust(self) -> int:
        """The samples that are still correct after the last stage."""
        later = (result for name, result in self.results.items() if name not in SEARCHES)
        return self.searched - sum(int(result.fooled.sum()) for result in later)

    @property
    def escalation(self) -> list[str]:
        """The names of AutoAttack's members that ran."""
        return [name for name in self.results if name not in (*SEARCHES, *ON_SENTINELS)]

    @property
    def fooled_by_search(self) -> Tensor:
        return self._search.fooled

    @cached_property
    def given_up(self) -> int:
        """How many samples the search took for robust after short runs, those that were then audited among them."""
        return int(self._first("given_up").sum())

    @property
    def unseen(self) -> Tensor:
        """The places of the samples that were given up and not attacked to the end."""
        return (self._first("given_up") & ~self._seen).nonzero().squeeze(1)

    @cached_property
    def audited(self) -> int:
        """How many of the given-up samples, drawn at random, were attacked to the end."""
        return int(self._audited.sum())

    @cached_property
    def broken_by_audit(self) -> int:
        return int((self._audited & self._search.fooled).sum())

    @property
    def audited_more(self) -> bool:
        """Whether further samples were audited because the first ones bound too little."""
        return AUDIT in self.results

    def more_to_audit(self, most: int) -> int:
        """The smallest number of further samples that, if none is broken, bounds the missed ones by `most`."""

        def bound(more: int) -> int:
            audited, broken = self.audited + more, self.broken_by_audit
            return total_broken(self.given_up, audited, broken, _MISSED)[1] - broken

        return bisect_left(range(len(self.unseen)), True, key=lambda more: bound(more) <= most)

    @property
    def gave_up_too_many(self) -> bool:
        """Whether more samples would be missed than can be tolerated.

        By the share of audited ones that were broken, or because runs towards targets find so much that other losses
        did not: then longer ones find more, also of samples that seem far.
        """
        if len(self.unseen) == 0:
            return False
        missed = self.broken_by_audit * (self.given_up - self.audited) / max(self.audited, 1)
        targets = STAGES.index("targets")
        late = self._first("fell_in") >= targets
        near = int((self._first("fell_in") == targets).sum())
        open_to_them = int((late | (self._first("fell_in") < 0)).sum())
        return missed > _TOLERATED * self.attacked or near > max(1, _TARGETED * open_to_them)

    @property
    def searched_whole(self) -> bool:
        """Whether all given-up samples were attacked to the end after all."""
        return WHOLE_SEARCH in self.results

    @property
    def missed_at_most(self) -> int:
        """One-sided 95 % bound on the samples that were given up and would have been broken."""
        if self.searched_whole:
            return 0
        most = total_broken(self.given_up, self.audited, self.broken_by_audit, _MISSED)[1]
        return most - self.broken_by_audit

    @cached_property
    def sentinels(self) -> int:
        """How many samples were attacked by Square."""
        return max((len(result.samples) for result in self._squares), default=0)

    @cached_property
    def ahead(self) -> int:
        """On how many sentinels Square came closer to the boundary than the gradients, or crossed it."""
        margins = dict(zip(self._search.samples.tolist(), self._info("margin").tolist(), strict=True))
        ahead: set[int] = set()
        for result in self._squares:
            for sample, fooled, reached in zip(
                result.samples.tolist(), result.fooled.tolist(), result.info[SQUARE_MARGIN].tolist(), strict=True
            ):
                if fooled or reached > margins[sample] + _AHEAD * abs(margins[sample]):
                    ahead.add(sample)
        return len(ahead)

    @property
    def masked_by_sentinels(self) -> bool:
        """Whether Square is ahead on more sentinels than it can be by luck."""
        return binomial_tail(self.ahead, self.sentinels, _LUCKY) < _ALARM

    @property
    def cleared_by_sentinels(self) -> bool:
        """Whether so few would be seen with a small chance only, if the model were masked."""
        return 1 - binomial_tail(self.ahead + 1, self.sentinels, _MASKED) < _CLEAR

    @cached_property
    def kept_promise(self) -> float:
        """The median over samples of the mean gain ratio of free steps; NaN if too few samples have any."""
        return self._median("ratio", "free")

    @cached_property
    def wild_steps(self) -> float:
        """The median over robust samples of the share of wild steps among cornered ones; NaN if too few have any.

        Samples that the search breaks early have one or two such steps, whose share says nothing.
        """
        return self._median("wild", "cornered", ~self._search.fooled)

    @cached_property
    def kept_from(self) -> dict[str, Tensor]:
        """What single steps keep of their promise, by where they start: (sentinels, scales); without small numbers."""
        if KEPT not in self._probed:
            return {}
        starts = dict(zip(("the image", "a random point"), self._probed[KEPT].unbind(1), strict=True))
        known = {start: kept[~kept.isnan().any(1)] for start, kept in starts.items()}
        return {start: kept for start, kept in known.items() if len(kept) >= FEW}

    @cached_property
    def one_hot(self) -> float:
        """The share of one-hot rows in the most saturated attention; NaN if that is not known."""
        shares = self._probed[ONE_HOT].nanmean(0) if ONE_HOT in self._probed else torch.zeros(0)
        return max((share for share in shares.tolist() if not math.isnan(share)), default=math.nan)

    @cached_property
    def signs(self) -> list[str]:
        """The reasons to run all of AutoAttack."""
        signs, restarted = [], self.count["restarts"] + self.count["kept alive"]
        if self.broken_by_sentinels:
            signs.append(
                f"FAB or Square broke {self.broken_by_sentinels} of the {self.sentinels} samples they were run on"
            )
        elif self.masked_by_sentinels:
            signs.append(
                f"Square came closer to the boundary than the gradients on {self.ahead} of {self.sentinels} samples"
            )
        if self.kept_promise < _KEPT:
            signs.append(
                f"steps along the gradient delivered {100 * self.kept_promise:.0f} % of what it promised, in honest "
                f"models it is more than {100 * _KEPT:.0f} %"
            )
        if self.wild_steps > WILD:
            signs.append(
                f"{100 * self.wild_steps:.0f} % of the steps at the border of the budget changed the loss by more than "
                f"twice what the gradient promised, in honest models less than {100 * WILD:.0f} %: the output jumps"
            )
        for start, kept in self.kept_from.items():
            if are_broken(kept):
                shares = ", ".join(f"{100 * share:.0f}" for share in kept.median(0).values.tolist())
                lengths = ", ".join(f"{STEP * scale:g}" for scale in SCALES)
                signs.append(
                    f"single steps of {lengths} eps from {start} delivered {shares} % of what the gradient promised "
                    f"(medians of {len(kept)} samples, {int((kept <= 0).any(1).sum())} of which got nothing from some)"
                )
        if self.one_hot > SATURATED:
            signs.append(f"{100 * self.one_hot:.0f} % of the rows of an attention are one-hot to the last bit")
        if self.flat:
            signs.append(f"{self.flat} robust samples have no gradient at all")
        if exceeds_share(self.late, self.attacked, _MISLED):
            signs.append(self._late_text)
        if exceeds_share(restarted, self.searched + restarted, _UNFINISHED):
            signs.append(self._restarts_text)
        return signs

    @cached_property
    def doubts(self) -> list[str]:
        """Reasons not to trust the number that are too weak for more attacks."""
        doubts, restarted = [], self.count["restarts"] + self.count["kept alive"]
        alive = int(self._info("kept_alive").sum())
        if self.count["kept alive"]:
            unseen = int(self._info("far").sum()) - alive
            doubts.append(
                f"{self.count['kept alive']} of {alive} far samples were misclassified when given all restarts, so "
                f"about {round(self.count['kept alive'] * unseen / alive)} more may be missing"
            )
        if restarted > max(1, _CONVERGED * (self.searched + restarted)):
            doubts.append(self._restarts_text)
        if self.late > _MISLED * self.attacked:
            doubts.append(self._late_text)
        undecided = not (self.masked_by_sentinels or self.cleared_by_sentinels)
        if undecided and self.robust > _NEGLIGIBLE * self.attacked:
            doubts.append(
                f"{self.sentinels} robust samples are too few to exclude masked gradients"
                if self.ahead == 0
                else f"Square came closer to the boundary than the gradients on {self.ahead} of {self.sentinels} "
                "samples, too few to judge"
            )
        return [doubt for doubt in doubts if doubt not in self.signs]

    @property
    def summary(self) -> str:
        alive = int(self._info("kept_alive").sum())
        checked = f"Square checked {self.sentinels} of them, {alive} far ones got all restarts"
        given_up = f"; {self.given_up} were given up, {self.audited} of these attacked to the end"
        if self.searched_whole:
            given_up += f" ({self.broken_by_audit} broken), and then all others"
        return f"{self.searched} samples are robust to the search; {checked}{given_up if self.given_up else ''}"

    @property
    def flat(self) -> int:
        """Samples that are still correct after the search and have no gradient."""
        return int((self._info("missing").isinf() & ~self._search.fooled).sum())

    @property
    def late(self) -> int:
        """Samples that withstood the cross-entropy and were misclassified in a later stage of the search."""
        return sum(self.count.values()) - self.count["clean"] - self.count["cross-entropy"]

    @property
    def _late_text(self) -> str:
        return (
            f"{self.late} samples withstood the cross-entropy and were misclassified under other losses: its gradients "
            "mislead"
        )

    @property
    def _restarts_text(self) -> str:
        return f"the last restarts still broke {self.count['restarts'] + self.count['kept alive']} samples"

    @cached_property
    def _search(self) -> StageResult:
        """The search, with the results of further ones for samples that were given up."""
        first = self.results[SEARCH]
        fooled, info = first.fooled.clone(), {name: values.clone() for name, values in first.info.items()}
        for more in (self.results[name] for name in SEARCHES[1:] if name in self.results):
            rows = torch.isin(first.samples, more.samples)
            order = more.samples.argsort()
            assert torch.equal(first.samples[rows], more.samples[order])
            fooled[rows] = more.fooled[order]
            for name in info.keys() & more.info.keys():
                info[name][rows] = more.info[name][order]
        return StageResult(first.samples, fooled, info)

    @property
    def _audited(self) -> Tensor:
        """Which given-up samples were drawn by their own lots, or drawn later to bound what is missed."""
        more = self.results.get(AUDIT)
        drawn = self._first("audited")
        return drawn if more is None else drawn | torch.isin(self.results[SEARCH].samples, more.samples)

    @property
    def _seen(self) -> Tensor:
        """Which given-up samples were attacked to the end."""
        whole = self.results.get(WHOLE_SEARCH)
        return self._audited if whole is None else torch.ones_like(self._audited)

    def _first(self, name: str) -> Tensor:
        """Of the search that gives samples up; false or 0 if it does not say."""
        first = self.results[SEARCH]
        return first.info[name] if name in first.info else torch.zeros(len(first.samples), dtype=torch.bool)

    @property
    def _probed(self) -> SampleInfo:
        return self.results[PROBE].info if PROBE in self.results else {}

    @property
    def _squares(self) -> list[StageResult]:
        return [self.results[name] for name in SQUARE_SENTINELS if name in self.results]

    @property
    def _sentinels(self) -> list[StageResult]:
        return [*self._squares, *(self.results[name] for name in (FAB_SENTINEL,) if name in self.results)]

    def _info(self, name: str) -> Tensor:
        info = self._search.info
        return info[name] if name in info else torch.zeros(len(self._search.samples))

    def _median(self, term: str, kind: str, among: Tensor | slice = slice(None)) -> float:
        if GAINS not in self._search.info:
            return float("nan")
        means = mean_over_steps(self._search.info[GAINS][among], term, kind)
        return float(means.nanmedian()) if int((~means.isnan()).sum()) >= FEW else float("nan")
