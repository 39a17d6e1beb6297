"""SpectralFOOF, Muon and AdamW at their usual settings: processor time to the same validation score.

Run: python benchmarks/spectral.py --out runs/spectral [--write docs/results/spectral.md]

The four workloads of `bayesgrad race` on which settings were chosen (by another seed), without its search, for five
seeds. Fixed before the first run: the target is the worst, over seeds, of AdamW's best validation scores within a
budget; the time is the median over seeds of processor seconds of the steps on one thread, with the lowest and highest;
SpectralFOOF is faster if its highest time is below the other's lowest, slower if the reverse holds, and else this is
not resolved. Settings of the optimizers and all schedules are those of the race's track without a search.

Finished runs are kept in `--out` and are not run again. Two processes may run different `--workloads`; a third run
without this option, which finds all of them, writes the page.
"""

from __future__ import annotations

import argparse
import math
import statistics
import warnings
from pathlib import Path

import torch
from torch import Tensor

from bayesgrad_lab.benchmarks import page
from bayesgrad_lab.context import Context
from bayesgrad_lab.race import Race, races, steps_to, time_to, within
from bayesgrad_lab.race_entrants import BASELINE
from bayesgrad_lab.race_workloads import UNITS, WORKLOADS

OTHERS = ("muon", "spectralfoof")
CHOOSING = [name for name, one in WORKLOADS.items() if not one.held_out]


def curves(race: Race, seeds: int, target: float = -math.inf) -> list[Tensor]:
    return [race.run(race.protocol.usual(race.entrant), seed, target) for seed in range(seeds)]


def shown(seconds: list[float], steps: list[float]) -> str:
    if math.isinf(statistics.median(seconds)):
        return f"reached by {sum(map(math.isfinite, seconds))} of {len(seconds)} seeds"
    words = [f"{one:.1f}" for one in (statistics.median(seconds), min(seconds), max(seconds))]
    return f"{words[0]} [{words[1]}, {words[2]}] ({statistics.median(steps):.0f})"


def compared(own: list[float], other: list[float]) -> str:
    """The ratio of medians, if both are finite, and which is faster."""
    word = "faster" if max(own) < min(other) else "slower" if min(own) > max(other) else "not resolved"
    middle = statistics.median(own), statistics.median(other)
    return f"{middle[0] / middle[1]:.2f}, {word}" if all(map(math.isfinite, middle)) else word


def table(context: Context, names: list[str]) -> list[str]:
    lines = [
        "# SpectralFOOF beside Muon and AdamW",
        "",
        f"`python benchmarks/spectral.py`, {page.setting()}. Processor seconds (and steps) until a validation score is "
        "reached that AdamW reaches with every seed in a budget: medians of five seeds, with the lowest and highest "
        "(a 94 % interval of the median). Each optimizer has one setting for all workloads and one schedule; settings "
        "were chosen on the same workloads with another seed. SpectralFOOF is faster where its highest time is below "
        "the other's lowest. The script says what was fixed before the first run. AdamW and Muon with tuned rates "
        "may be faster than here.",
        "",
        "| workload (budget) | target | AdamW | Muon | SpectralFOOF | ratio to AdamW | ratio to Muon |",
        "|---|---|---|---|---|---|---|",
    ]
    for name in names:
        adamw, muon, own = races(context, [name], [BASELINE, *OTHERS])
        found = {BASELINE: curves(adamw, context.seeds)}
        target = max(within(curve, adamw.budget) for curve in found[BASELINE])
        found |= {one.entrant.kind: curves(one, context.seeds, target) for one in (muon, own)}
        times = {kind: [time_to(curve, target) for curve in each] for kind, each in found.items()}
        cells = [shown(times[kind], [steps_to(curve, target) for curve in each]) for kind, each in found.items()]
        ratios = [compared(times["spectralfoof"], times[kind]) for kind in (BASELINE, "muon")]
        one = WORKLOADS[name]
        goal = f"{UNITS[one.metric]} {target:.4g}"
        lines.append("| " + " | ".join([f"{one.title} ({adamw.budget:g} s)", goal, *cells, *ratios]) + " |")
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("runs/spectral"), help="folder of finished runs")
    parser.add_argument("--write", type=Path, help="Markdown file to write; its sections below the table are kept")
    parser.add_argument("--data-dir", help="where data files are (default: $BAYESGRAD_DATA)")
    parser.add_argument("--workloads", nargs="+", choices=CHOOSING, default=CHOOSING)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--scale", default="laptop", choices=("laptop", "smoke"))
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore", ".*trains .* by Adam")
    arguments.out.mkdir(parents=True, exist_ok=True)
    context = Context(arguments.out, arguments.scale, arguments.seeds, data_dir=arguments.data_dir)
    lines = table(context, arguments.workloads)
    print("\n".join(lines))
    if arguments.write:
        _, *notes = arguments.write.read_text().partition("\n## ") if arguments.write.exists() else [""]
        arguments.write.write_text("\n".join(lines) + "\n" + "".join(notes))


if __name__ == "__main__":
    main()
