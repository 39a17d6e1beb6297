"""Every estimator of `bayesgrad.models` with default settings beside its counterpart, on about a hundred small sets.

Run: python benchmarks/estimators.py --out runs/estimators.jsonl --data-dir DIR [--write docs/results/estimators.md]

Sets: 56 tables with two classes, 20 regressions, six regressions of the UCI repository (their first split), three
tables with more classes, two of counts, 14 time series, and documents. Both packages see the same rows: columns have
mean 0 and deviation 1 over the training rows, and so have targets of regressions and series; columns that are constant
in the training rows are left out. Gaussian processes take the first 300 training rows. Densities (mixtures, factors,
hidden Markov models) are fitted to the columns of the same tables; a Markov model reads the rows as one sequence.

The score is the mean log-likelihood of held-out rows (of series: of the last 30 %, given the first 70 %). The rule,
fixed before the first run: ours >= theirs - max(0.01 |theirs|, 0.005) nats. Where it fails and the defaults differ by
design, a comparison with the same model in both packages follows.

Finished comparisons are appended to `--out`, one line of JSON each, and are not run again but with `--again`; the last
line of a comparison is what the page has.
"""

from __future__ import annotations

import json
import math
import os
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch
from estimators_compared import COMPARISONS, ROWS, Comparison, Scores, sets

from bayesgrad_lab.benchmarks import page
from bayesgrad_lab.tables import Table

RELATIVE, ABSOLUTE = 0.01, 0.005
INTRODUCTION = """
# Estimators with default settings

`python benchmarks/estimators.py`, {setting}. Every estimator of `bayesgrad.models` beside its counterpart in
scikit-learn, statsmodels or hmmlearn: {counts} times; the counterpart failed {unlike} times.
Where both fit the same model, {same}.

Both packages see the same rows: columns have mean 0 and deviation 1 over the training rows, and so have targets of
regressions and series; columns that are constant in the training rows are left out. 30 % of the rows are held out,
except where a set has its own split (a1a, UCI: the first of twenty). Gaussian processes take at most {rows} training
rows. Mixtures, factors and Markov models are fitted to the columns of the same tables; a Markov model reads the rows of
a table as one sequence. Settings are defaults, except those that the names show.

The score is the mean log-likelihood of held-out rows: of labels or targets, of the columns, for documents the bound per
word, for series of the last 30 % given the first 70 %. The rule was fixed before the first run: ours >= theirs -
max(0.01 |theirs|, 0.005) nats; the absolute part matters only where theirs is near 0. "Training" is the same rule for
what both maximise: the evidence, or the likelihood of the training rows.

Groups: *binary* a1a, australian, breast cancer (twice), german, and all pairs of classes of digits, iris and wine;
*regression* the 20 regressions of `bayesgrad_lab.tables`; *UCI* six regressions; *classes* iris, wine and digits;
*counts* wine quality and doctor visits; *series* 14 economic and natural ones of statsmodels; *documents* digits as
counts of ink, and the articles of the Associated Press.

| ours | counterpart | group | sets | crashes | NaN | warned | held out | training | worst set: ours, theirs |
|---|---|---|---|---|---|---|---|---|---|
"""
REMARKS = """
Why, and what follows. Linear models at `coef_` and without intercept, the learned prior of logistic models, and Markov
models with diagonal covariances and from a given start were added after the first run, for what missed the rule in it.
The floor of factors, the prior of Markov models, and mixtures with the same tolerance or iterations came later, for
what still missed it. Both values are those of other packages and were not tuned on held-out rows, though 0.01 had been
tried on some of these sets before. Since then `GaussianMixture(3)` and `FactorAnalysis()`, which stop elsewhere than
scikit-learn's, do not count as the same model.

- **Logistic, probit and multinomial models** average over the posterior, which is less confident than its mode where
  classes are nearly separable: both have the same prior and predict differently by design, and the defaults stay. At
  the mode (`expectation="delta"`) ours equals `LogisticRegression` on every set. A learned prior mends 19 of 46
  failures, and does not converge in 100 steps on 16 sets that are nearly separable. Probit of statsmodels has no prior;
  there is no comparison with the same one.
- **Linear models**: `GLM()` has noise of scale 1, and the variance of the posterior adds to it, which is too much for
  standardised targets that are well explained; a plug-in prediction leaves it out by design. At `coef_` ours is
  `Ridge`. With learned noise the rule fails twice beside `BayesianRidge` and `ARDRegression`, which treat the intercept
  as known; without intercept it always holds.
- **Student's t** beside `TLinearModel`, which has no prior: two sets; there is no comparison with the same prior.
- **Gaussian processes** with the same kernel and noise pass on every set. scikit-learn's default has no noise, and is
  better on six sets; one of them, wine-red, has many repeated rows. Student's t has no counterpart; only crashes and
  NaN are counted.
- **Mixtures** have the start of scikit-learn's, and go on to a higher likelihood in training, with a tolerance of 1e-5
  instead of 1e-3; with the same tolerance the rule holds on all held-out parts. Training scores of `method="vmp"` are
  not compared: scikit-learn's bound lacks constants, and the density of training rows is higher at the expected
  parameters than averaged over the posterior. The parameters after the same iterations are compared instead.
- **Factors** as many as columns fit any covariance matrix. Ours is the Gaussian of maximum likelihood, as
  `GaussianMixture()`, up to the floor of the noise. scikit-learn's `loglike_` takes logarithms of all eigenvalues,
  those below 1 too, which its model does not have, and so ends after a few iterations at a lower likelihood (on digits
  2-3 without randomisation after 7, where it is 14.9 per row and the likelihood -51.7). Until the floor became 0.005 of
  a column's variance, the bound of R's `factanal`, it was 1e-12, and on a1a and four pairs of digits held-out scores
  were -1.6e7 to -1.2e12. With one factor the noise of a column is at the floor on seven sets; `FactorAnalysis` warns.
- **Hidden Markov models**: until the prior of covariances was hmmlearn's, 0.01 in units of the columns, it was 1e-6.
  Held-out scores were then below -1000 on 11 sets with full covariances (now 5; hmmlearn 11) and on 13 with diagonal
  ones (now 1; hmmlearn 1). The rule held on 60 and 65 of 96, now on 54 and 76; in training on 90 and 95, now on 43 and
  93. hmmlearn's value was taken as it is, and checked on the last 30 % of the training rows: of 1e-6, 1e-4, 1e-3, 0.01,
  0.1 and 1 the rule holds most often for 0.01, on 147 of 192 fits (67 full, 80 diagonal). Full covariances alone pass
  most often with 1 (82 of 96), which would add much of the variance between states to that within them. hmmlearn adds
  its number to all elements of full covariances, which regularises one direction only. On digits many pixels do not
  vary in a state: without a prior in their directions the density is high where they do not vary in new rows, and close
  to 0 where they do. From the same start, with the prior on the diagonal and the same number of iterations, both have
  the same held-out scores. What fails with diagonal covariances fails by start and number of iterations. The start of
  `HiddenMarkov` was chosen on these sets, for its likelihood in training.
- **State-space models**: in the first run EM did not converge on 24 of 28 fits, and the rule failed on seven. EM was
  then accelerated; these series are therefore no independent test of it.
"""


# --- runs ---


def attempt(fit: Callable[[Table], Scores], table: Table) -> dict[str, Any]:
    """Scores, processor seconds, warnings and the error, if there is one."""
    begin = time.process_time()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            scores, error = fit(table), ""
        except Exception as found:  # what a fit raises is what is measured
            scores, error = {}, f"{type(found).__name__}: {found}"
    texts = dict.fromkeys(f"{w.category.__name__}: {w.message}" for w in caught)
    return {**scores, "error": error, "warnings": list(texts), "seconds": time.process_time() - begin}


def compare(comparison: Comparison, group: str, table: Table) -> dict[str, Any]:
    given = table if comparison.rows is None else table.capped(comparison.rows)
    ours = attempt(comparison.fit, given)
    theirs = attempt(comparison.fit_theirs, given) if comparison.fit_theirs else {}
    names = {"ours": comparison.ours, "theirs": comparison.theirs, "group": group, "set": table.name}
    return {**names, "rows": given.train_x.shape[0], "columns": given.train_x.shape[1], "found": ours, "peer": theirs}


def key(run: dict) -> tuple:
    return run["ours"], run["theirs"], run["group"], run["set"]


def pending(present: set[tuple], data_dir: str | None, wanted: str | None) -> Iterator[tuple[Comparison, str, Table]]:
    for group, members in sets(data_dir).items():
        for name, read in members.items():
            left = [
                c
                for c in COMPARISONS
                if group in c.groups
                and (c.ours, c.theirs, group, name) not in present
                and (wanted is None or wanted in c.ours)
            ]
            if left:
                try:
                    table = read()
                except FileNotFoundError as error:
                    print(f"{group} {name}: {error}", flush=True)
                    continue
                yield from ((comparison, group, table) for comparison in left)


def score(found: dict) -> float:
    return found.get("score", math.nan)


def margin(run: dict) -> float:
    """Ours less theirs, in units of what the rule allows: below -1 the rule fails."""
    allowed = max(RELATIVE * abs(score(run["peer"])), ABSOLUTE)
    return (score(run["found"]) - score(run["peer"])) / allowed


def holds(run: dict) -> bool:
    return margin(run) >= -1


def finished(out: Path) -> list[dict]:
    """What was recorded before; creates the folder of the file."""
    out.parent.mkdir(parents=True, exist_ok=True)
    return [json.loads(line) for line in out.read_text().splitlines()] if out.exists() else []


# --- the page ---


def better(run: dict, name: str) -> bool:
    """The rule, for the held-out score or for what is maximised in training."""
    ours, theirs = run["found"].get(name, math.nan), run["peer"].get(name, math.nan)
    return ours >= theirs - max(RELATIVE * abs(theirs), ABSOLUTE)


def finite(found: dict) -> bool:
    return math.isfinite(score(found))


def of(comparison: Comparison, runs: list[dict]) -> list[dict]:
    return [run for run in runs if (run["ours"], run["theirs"]) == (comparison.ours, comparison.theirs)]


def row(comparison: Comparison, group: str, runs: list[dict]) -> str:
    both = [run for run in runs if finite(run["found"]) and finite(run["peer"])]
    crashes = sum(bool(run["found"]["error"]) for run in runs)
    undefined = sum(not run["found"]["error"] and not finite(run["found"]) for run in runs)
    warned = sum(bool(run["found"]["warnings"]) for run in runs)
    cells = [f"`{comparison.ours}`", comparison.theirs or "-", group, len(runs), crashes, undefined, warned]
    if not both:
        return "| " + " | ".join(map(str, [*cells, "-", "-", "-"])) + " |"
    trained = [run for run in both if "evidence" in run["found"] and "evidence" in run["peer"]]
    worst = min(both, key=margin)
    ours, theirs = score(worst["found"]), score(worst["peer"])
    cells += [
        f"{sum(better(run, 'score') for run in both)} of {len(both)}",
        f"{sum(better(run, 'evidence') for run in trained)} of {len(trained)}" if trained else "-",
        f"{worst['set']}: {ours:.4g}, {theirs:.4g}",
    ]
    return "| " + " | ".join(map(str, cells)) + " |"


def failures(comparison: Comparison, runs: list[dict]) -> Iterator[str]:
    """Sets where the rule fails, and what is known of them."""
    bad = [run for run in runs if finite(run["found"]) and finite(run["peer"]) and not better(run, "score")]
    if bad:
        fitted = [run for run in bad if "evidence" in run["found"] and better(run, "evidence")]
        words = f"- `{comparison.ours}` beside {comparison.theirs}: {len(bad)} sets"
        if comparison.differs:
            words += f"; {comparison.differs}"
        if fitted:
            words += f"; on {len(fitted)} of them ours is within 1 % of theirs or better in training"
        numbers = [
            f"{run['set']} {score(run['found']):.4g}, {score(run['peer']):.4g}" for run in sorted(bad, key=margin)
        ]
        yield f"{words}. The worst: {'; '.join(numbers[:6])}."


def agreement(comparison: Comparison, runs: list[dict]) -> Iterator[str]:
    """How far parameters differ, where they are compared."""
    found = sorted((run["found"]["difference"], run["set"]) for run in runs if "difference" in run["found"])
    if found:
        (largest, name), (middle, _) = found[-1], found[len(found) // 2]
        near = sum(difference <= 1e-6 for difference, _ in found)
        yield (
            f"- `{comparison.ours}` beside {comparison.theirs}: parameters within 1e-6 on {near} of {len(found)} sets; "
            f"largest difference {largest:.1g} ({name}), median {middle:.1g}."
        )


def notices(runs: list[dict]) -> Iterator[str]:
    """Errors and warnings of ours."""
    for run in runs:
        texts = [run["found"]["error"]] if run["found"]["error"] else run["found"]["warnings"]
        for text in texts:
            yield f"- `{run['ours']}`, {run['set']}: {text}"


def lines(runs: list[dict]) -> list[str]:
    runs = list({key(run): run for run in runs}.values())
    known = [(comparison, of(comparison, runs)) for comparison in COMPARISONS]
    every = [run for _, own in known for run in own]
    crashes = sum(bool(run["found"]["error"]) for run in every)
    undefined = sum(not run["found"]["error"] and not finite(run["found"]) for run in every)
    unlike = sum(bool(run["peer"].get("error")) or (bool(run["peer"]) and not finite(run["peer"])) for run in every)
    same = [run for c, own in known if not c.differs for run in own if finite(run["peer"])]
    held = sum(better(run, "score") for run in same)
    setting = page.setting().replace("float32", "float64")
    counts = f"{len(every)} comparisons, in which ours crashed {crashes} times and returned NaN or infinity {undefined}"
    same_model = f"ours is within 1 % or better on {held} of {len(same)} held-out parts"
    text = INTRODUCTION.format(setting=setting, counts=counts, unlike=unlike, same=same_model, rows=ROWS)
    found = text.strip().splitlines()
    for comparison, own in known:
        for group in comparison.groups:
            if some := [run for run in own if run["group"] == group]:
                found.append(row(comparison, group, some))
    found += ["", "## Where the rule fails", ""]
    for comparison, own in known:
        found += failures(comparison, own)
    found += ["", *REMARKS.strip().splitlines(), "", "## Parameters after the same iterations", ""]
    found += ["In units of the largest parameter of each kind.", ""]
    for comparison, own in known:
        found += agreement(comparison, own)
    found += ["", "## Warnings of ours", "", *notices(every), "", "## All scores", ""]
    found += ["Held-out scores, ours and theirs.", "", "<details>", "<summary>All sets</summary>", ""]
    for comparison, own in known:
        numbers = [f"{run['set']} {score(run['found']):.4g}, {score(run['peer']):.4g}" for run in own]
        found += [f"- `{comparison.ours}` beside {comparison.theirs or 'nothing'}: {'; '.join(numbers)}."]
    return [*found, "", "</details>"]


def main() -> None:
    parser = page.options(__doc__)
    parser.add_argument("--out", type=Path, required=True, help="JSON lines, to which comparisons are appended")
    parser.add_argument("--data-dir", help="where data files are; else $BAYESGRAD_DATA")
    parser.add_argument("--only", help="part of the name of an estimator")
    parser.add_argument("--again", action="store_true", help="run those of --only even if --out has them")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    runs = finished(arguments.out)
    present = set() if arguments.again else {key(run) for run in runs}
    for comparison, group, table in pending(present, arguments.data_dir, arguments.only):
        run = compare(comparison, group, table)
        runs.append(run)
        with arguments.out.open("a") as file:
            file.write(json.dumps(run) + "\n")
        ours, theirs = run["found"], run["peer"]
        text = "" if holds(run) or not theirs else " below"
        times = f"{ours['seconds']:.1f} s, {theirs.get('seconds', 0):.1f} s"
        print(
            f"{run['ours']} | {group} {table.name}: {score(ours):.4f}, {score(theirs):.4f}{text}; {times}", flush=True
        )
        for found in (ours, theirs):
            if found.get("error"):
                print(f"    {found['error'][:200]}", flush=True)
    page.publish(lines(runs), arguments.write)


if __name__ == "__main__":
    main()
